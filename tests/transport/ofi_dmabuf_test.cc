// SPDX-License-Identifier: Apache-2.0
//
// Device memory over libfabric, as far as it can be tested without a card that supports it: what refuses it,
// and with which message. A refusal with kUnsupported leads to a copy through host memory.

#include "transport/ofi/dmabuf.h"

#include <gmock/gmock.h>
#include <rdma/fi_domain.h>

#include "tests/transport/rig.h"
#include "transport/ofi/ofi_transport.h"

namespace ropeteam::ofi {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(OfiDmabuf, AnOldLibraryIsNamedWithTheOneThatIsNeeded) {
  EXPECT_EQ(WhyNoDmabuf(FI_VERSION(1, 17), FI_VERSION(1, 17), "efa"), "libfabric 1.17 found, 1.20 needed");
  EXPECT_EQ(WhyNoDmabuf(FI_VERSION(2, 1), FI_VERSION(1, 19), "efa"), "libfabric 1.19 found, 1.20 needed");
  EXPECT_EQ(WhyNoDmabuf(FI_VERSION(1, 17), FI_VERSION(2, 1), "efa"),
            "built against libfabric 1.17, 1.20 needed");
}

TEST(OfiDmabuf, OnlyEfaTouchesTheMemoryWithTheCardAlone) {
  EXPECT_EQ(WhyNoDmabuf(FI_VERSION(1, 20), FI_VERSION(1, 20), "efa"), "");
  EXPECT_EQ(WhyNoDmabuf(FI_VERSION(1, 22), FI_VERSION(2, 0), "efa"), "");
  for (const char* provider : {"tcp;ofi_rxm", "verbs;ofi_rxm", "shm"})
    EXPECT_THAT(WhyNoDmabuf(FI_VERSION(1, 20), FI_VERSION(1, 20), provider),
                AllOf(HasSubstr(provider), HasSubstr("efa")));
}

TEST(OfiDmabuf, IsRefusedInWordsWithOneRailAndWithSeveral) {
  test::Memory memory(1 << 20);
  for (const char* addresses : {"127.0.0.1", "127.0.0.1,127.0.0.2"}) {
    auto made = CreateOfiTransport({.listen_address = addresses});
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    Transport& transport = **made;
    EXPECT_FALSE(transport.capabilities().dmabuf);
    const auto refused = transport.RegisterDmabuf(memory.fd(), 0, 4096);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), Code::kUnsupported);
    const uint32_t built = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
    EXPECT_THAT(refused.status().message(),
                AllOf(HasSubstr("cannot register a dmabuf"),
                      HasSubstr(WhyNoDmabuf(built, fi_version(), transport.capabilities().provider))));
    // The refused region takes no table entry, and other memory is registered as usual.
    for (size_t i = 0; i < kRegionsMax; i++)
      ASSERT_TRUE(transport.RegisterRegion(memory.data(), 4096).ok()) << i;
    EXPECT_EQ(transport.counters().registrations, kRegionsMax);
  }
}

}  // namespace
}  // namespace ropeteam::ofi
