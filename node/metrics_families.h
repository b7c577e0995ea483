// SPDX-License-Identifier: Apache-2.0
//
// A snapshot as Prometheus' metric families. Label values are bounded: fixed words, and the names of the view's other
// members. Pure functions.

#ifndef ROPETEAM_NODE_METRICS_FAMILIES_H_
#define ROPETEAM_NODE_METRICS_FAMILIES_H_

#include <vector>

#include "node/metrics.h"

namespace prometheus {
struct MetricFamily;
}

namespace ropeteam {

// `waited`: how long the loop took to give the snapshot.
std::vector<prometheus::MetricFamily> FamiliesOf(const MetricsSnapshot& snapshot, TimeUs waited);
// The families if the loop gives no snapshot.
std::vector<prometheus::MetricFamily> SilentFamilies();

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_METRICS_FAMILIES_H_
