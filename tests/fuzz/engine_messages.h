// SPDX-License-Identifier: Apache-2.0
//
// All messages between engines, as a list of types.

#ifndef ROPETEAM_TESTS_FUZZ_ENGINE_MESSAGES_H_
#define ROPETEAM_TESTS_FUZZ_ENGINE_MESSAGES_H_

#include <tuple>

#include "core/engine/messages.h"

namespace ropeteam::fuzz {

using EngineMessages =
    std::tuple<ReplicaReserve, ReplicaGrant, ReplicaArrived, ReplicaSeal, ReplicaSealed, ReplicaAbort,
               CopyQuery, Inventory, InventoryAck, LeaderState, LeaderStateAck, Question, Reply, FetchOpen,
               FetchGrant, FetchClose, BadCopy, CopyOrder, VerifyOrder, VerifyResult, DropCopy, DemoteCopy,
               InventoryDelta, PersistOrder, PersistResult, StoredRead, FetchOrder, CheckStored,
               StoredChecked, StorageOrder, StorageResult, EncryptedSeal, EncryptedGrant, EncryptCopy,
               RangesOpen, RangesGrant, RangesClose>;
// Payloads of a Question.
using EngineQuestions =
    std::tuple<JoinQuestion, LatestQuestion, LocateQuestion, Nothing, VerifyQuestion, PersistQuestion,
               QuarantineQuestion, DrainQuestion, DropQuestion, PolicyQuestion>;
// Payloads of a Reply.
using EngineReplies = std::tuple<JoinReply, LatestReply, LocateReply, ClusterReport, VerifyReport>;

}  // namespace ropeteam::fuzz

#endif  // ROPETEAM_TESTS_FUZZ_ENGINE_MESSAGES_H_
