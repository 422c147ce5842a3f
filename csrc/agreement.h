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

// Any number of threads may call any method. All throw RefusedError with the server's address.
class Agreement {
 public:
  // What is not given is as the first server has it.
  struct Terms {
    std::optional<std::string> spaces;
    std::optional<int64_t> num_envs;
    std::string env;  // else empty; servers that name none are accepted
  };

  explicit Agreement(Terms terms) : terms_(std::move(terms)) {}

  void check_handshake(const std::string& address, const rpcenv::Handshake& handshake);

  // Rows that differ in structure, dtypes or shapes could not be joined into batches.
  void check_row(const std::string& address, const Nest<Array>& env_outputs);

 private:
  Mutex mutex_;
  Terms terms_ TB_GUARDED_BY(mutex_);
  std::optional<Nest<std::string>> row_ TB_GUARDED_BY(mutex_);  // descriptions
};

// Throws RefusedError where a stream's first message holds no row, or not one within `ranges`.
void check_first_row(const std::string& address, const rpcenv::Step& first, Rollout::Ranges ranges);

// How two spaces differ, both JSON as in the handshake: "observation.shape[0] is 4, expected 1".
std::string describe_difference(const std::string& spaces, const std::string& expected);

}  // namespace torchbeast
