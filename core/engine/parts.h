// SPDX-License-Identifier: Apache-2.0
//
// The parts of one engine, in the order of their construction.

#ifndef ROPETEAM_CORE_ENGINE_PARTS_H_
#define ROPETEAM_CORE_ENGINE_PARTS_H_

#include "core/engine/asker.h"
#include "core/engine/context.h"
#include "core/engine/converter.h"
#include "core/engine/drainer.h"
#include "core/engine/fetcher.h"
#include "core/engine/holder.h"
#include "core/engine/leader.h"
#include "core/engine/links.h"
#include "core/engine/memory.h"
#include "core/engine/persister.h"
#include "core/engine/range_holder.h"
#include "core/engine/range_reader.h"
#include "core/engine/rekeyer.h"
#include "core/engine/replicator.h"
#include "core/engine/scrubber.h"
#include "core/engine/sessions.h"
#include "core/engine/storage_desk.h"
#include "core/engine/storage_works.h"
#include "core/engine/transfers.h"

namespace ropeteam::engine {

struct Parts {
  Parts(const EngineConfig& config, Store* store)
      : context(config, store),
        memory(&context),
        transfers(&context),
        storage(&context),
        asker(&context),
        replicator(this),
        holder(this),
        fetcher(this),
        converter(this),
        rekeyer(this),
        range_holder(this),
        range_reader(this),
        scrubber(this),
        persister(this),
        sessions(this),
        drainer(this),
        links(this),
        desk(&context, &storage),
        leader(&context, &desk) {}

  Context context;
  Memory memory;
  Transfers transfers;
  StorageWorks storage;
  Asker asker;
  Replicator replicator;
  Holder holder;
  Fetcher fetcher;
  Converter converter;
  Rekeyer rekeyer;
  RangeHolder range_holder;
  RangeReader range_reader;
  Scrubber scrubber;
  Persister persister;
  Sessions sessions;
  Drainer drainer;
  Links links;
  StorageDesk desk;
  Leader leader;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_PARTS_H_
