// SPDX-License-Identifier: Apache-2.0
// What all environment servers of a learner must have in common.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "array.h"
#include "mutex.h"
#include "nest.h"
#include "rollout.h"
#include "rpcenv.pb.h"

namespace torchbeast {

// Any number of threads may call any method. All throw RefusedError, which names the peer.
class Agreement {
 public:
  // Unset fields are taken from the first server's handshake.
  struct Terms {
    std::optional<std::string> spaces;
    std::optional<int64_t> num_envs;
    std::string env;  // empty: unset; servers without a name are accepted
  };

  explicit Agreement(Terms terms) : terms_(std::move(terms)) {}

  void check_handshake(const std::string& peer, const rpcenv::Handshake& handshake);

  // Refuses rows unlike the other servers' in structure, dtype or shape: batches could not join
  // them.
  void check_row(const std::string& peer, const Nest<Array>& env_outputs);

 private:
  Mutex mutex_;
  Terms terms_ TB_GUARDED_BY(mutex_);
  std::optional<Nest<std::string>> row_ TB_GUARDED_BY(mutex_);  // description of each array
};

// Throws RefusedError unless a stream's first message has a valid row within `ranges`.
void check_first_row(const std::string& peer, const rpcenv::Step& first, Rollout::Ranges ranges);

// How two spaces, both JSON from a handshake, differ: "observation.shape[0] is 4, expected 1".
std::string describe_difference(const std::string& spaces, const std::string& expected);

}  // namespace torchbeast
