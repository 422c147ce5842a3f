// SPDX-License-Identifier: Apache-2.0
// Options of a stream, which the learner sends to environments (rpcenv.proto).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace torchbeast {

struct StreamOptions {
  std::optional<int64_t> num_envs;  // unset: the environments' choice
  std::string seed;                 // integers separated by commas; empty: their choice
  bool newest_frame_only = false;
  bool truncated_rows = false;

  // As they travel: those that are set.
  std::map<std::string, std::string> to_texts() const {
    std::map<std::string, std::string> texts;
    if (num_envs) texts["num-envs"] = std::to_string(*num_envs);
    if (!seed.empty()) texts["seed"] = seed;
    if (newest_frame_only) texts["newest-frame-only"] = "1";
    if (truncated_rows) texts["truncated-rows"] = "1";
    return texts;
  }
};

}  // namespace torchbeast
