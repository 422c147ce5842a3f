// SPDX-License-Identifier: Apache-2.0
#include "rollout.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "wire.h"

namespace torchbeast {

namespace {

// Copy `row`, [N, ...] or [1, N, ...], to row t of `buffer`, [T + 1, N, ...].
void copy_row(const ArrayView& row, const Array& buffer, int64_t t) {
  const size_t num_bytes = row.num_bytes();
  if (num_bytes > 0) {
    std::memcpy(buffer.data.get() + static_cast<size_t>(t) * num_bytes, row.data, num_bytes);
  }
}

// Whether `row`, without its first `leading` dimensions, is like a row of `buffer`.
bool fits(const ArrayView& row, const Array& buffer, size_t leading) {
  return row.dtype == buffer.dtype && row.shape.size() + 1 == buffer.shape.size() + leading &&
         std::equal(row.shape.begin() + static_cast<int64_t>(leading), row.shape.end(),
                    buffer.shape.begin() + 1, buffer.shape.end());
}

// Throws WireError where the arrays of a row, [N, ...], differ from their ranges in structure,
// dtype or shape.
void check_space(const std::string& key, const Nest<ArrayView>& nest, const Nest<Array>& ranges) {
  if (!nest.same_structure(ranges, true))
    throw WireError("the structure of " + key + " is not that of its space");
  const std::vector<ArrayView> arrays = nest.flatten();
  size_t i = 0;
  ranges.for_each([&](const Array& range) {
    const ArrayView& array = arrays[i++];
    if (fits(array, range, 1)) return;
    Array expected = range;
    expected.shape[0] = array.shape.empty() ? 1 : array.shape[0];
    throw WireError(key + " is " + array.description() + ", but by its space " +
                    expected.description());
  });
}

}  // namespace

Rollout::Rollout(int64_t unroll_length, bool dict_outputs, const rpcenv::Step& first,
                 std::shared_ptr<MemoryPool> pool, std::optional<int32_t> actor, Ranges ranges) try
    : unroll_length_(unroll_length),
      dict_outputs_(dict_outputs),
      num_envs_(first.handshake().num_envs()),
      stack_size_(first.handshake().stack_size()),
      pool_(std::move(pool)),
      ranges_(std::move(ranges)) {
  if (actor) {
    actor_ = make_array(DType::kInt32, {num_envs_}, *pool_);
    std::fill_n(reinterpret_cast<int32_t*>(actor_->data.get()), num_envs_, *actor);
  }
  Nest<ArrayView>::Dict row = decode(first);
  if (stack_size_ > 0) {
    row.at("frame").leaf().shape = stacked_shape(first, num_envs_, stack_size_);
  }
  for (const auto& [key, nest] : ranges_) {
    if (row.count(key) == 0) throw std::invalid_argument("no row has the " + key + " of ranges");
    check_space(key, row.at(key), nest);
  }
  for (const auto& [key, nest] : row) {
    rows_.emplace(key, nest.map([&](const ArrayView& array) {
      Shape shape = array.shape;
      shape.insert(shape.begin(), unroll_length_ + 1);
      return make_array(array.dtype, std::move(shape), *pool_);
    }));
  }
  set_env_outputs(0, first);
} catch (const std::bad_alloc&) {
  throw WireError("a rollout of its rows does not fit into memory");
}

Nest<ArrayView>::Dict Rollout::decode(const rpcenv::Step& step) const {
  Nest<ArrayView>::Dict row = decode_row(step, num_envs_);
  if (actor_) row.emplace("actor", actor_->view());
  return row;
}

Nest<Array> Rollout::arrange(const Nest<Array>::Dict& rows) const {
  if (dict_outputs_) return rows;
  return Nest<Array>::Tuple{rows.at("frame"), rows.at("reward"), rows.at("done"),
                            rows.at("episode_step"), rows.at("episode_return")};
}

Nest<Array> Rollout::env_outputs(int64_t t) const {
  return arrange(rows_).map([&](const Array& buffer) { return buffer.row(t); });
}

void Rollout::set_env_outputs(int64_t t, const rpcenv::Step& step, const Nest<Array>* sent) {
  const Nest<ArrayView>::Dict row = decode(step);
  for (const auto& item : rows_) {
    const std::string& key = item.first;
    const Nest<Array>& buffers = item.second;
    const Nest<ArrayView>& nest = row.at(key);
    if (!nest.same_structure(buffers)) {
      throw WireError("the structure of " + key + " has changed");
    }
    if (stack_size_ > 0 && key == "frame") {
      std::optional<Array> previous;
      if (t > 0) previous = buffers.leaf().row(t - 1);
      restack(step, nest.leaf(), stack_size_, previous ? &*previous : nullptr,
              buffers.leaf().row(t));
      continue;
    }
    const std::vector<ArrayView> arrays = nest.flatten();
    size_t i = 0;
    buffers.for_each([&](const Array& buffer) {
      const ArrayView& array = arrays[i++];
      if (!fits(array, buffer, 0)) {
        throw WireError(key + " was " + buffer.row(0).description() + " and is now " +
                        array.description());
      }
      copy_row(array, buffer, t);
    });
  }
  check_ranges(t);
  if (dict_outputs_) check_last_action(t, sent);
}

void Rollout::check_ranges(int64_t t) const {
  for (const auto& [key, nest] : ranges_) {
    const std::vector<Array> ranges = nest.flatten();
    size_t leaf = 0;
    rows_.at(key).for_each([&, &name = key](const Array& buffer) {
      const ArrayView range = ranges[leaf++].view();
      if (range.shape[0] == 0) return;
      const size_t count =
          range.num_bytes() / size_of(range.dtype) / 2;  // numbers of one environment
      const Array row_array = buffer.row(t);
      const ArrayView row = row_array.view();
      for (size_t i = 0; i < count; ++i) {
        const int64_t least = range.integer_at(i);
        const int64_t largest = range.integer_at(count + i);
        for (size_t env = 0; env < static_cast<size_t>(num_envs_); ++env) {
          const int64_t value = row.integer_at(env * count + i);
          if (least <= value && value <= largest) continue;
          throw WireError(name + " has the number " + std::to_string(value) +
                          ", but by its space " + std::to_string(least) + " to " +
                          std::to_string(largest));
        }
      }
    });
  }
}

void Rollout::check_last_action(int64_t t, const Nest<Array>* sent) const {
  const Array& buffer = rows_.at("last_action").leaf();
  const Array row = buffer.row(t);
  if (t == 0) {
    const std::string data(reinterpret_cast<const char*>(row.data.get()), row.num_bytes());
    if (data.find_first_not_of('\0') == std::string::npos) return;
    throw WireError("last_action is not 0 in the very first row");
  }
  if (sent == nullptr || !sent->is_leaf() || sent->leaf().shape != row.shape) return;
  const ArrayView ours = sent->leaf().view();
  const ArrayView theirs = row.view();
  const Array before = buffer.row(t - 1);
  const Array truncated = rows_.at("truncated").leaf().row(t - 1);
  const Array terminated = rows_.at("terminated").leaf().row(t - 1);
  const bool integers = ours.is_integer() && theirs.is_integer();
  if (!integers && ours.dtype != theirs.dtype) return;
  const size_t item = size_of(theirs.dtype);
  const size_t count = theirs.num_bytes() / item / static_cast<size_t>(num_envs_);
  for (size_t i = 0; i < count * static_cast<size_t>(num_envs_); ++i) {
    // An action sent after the last row of an episode reaches no environment.
    const bool is_ignored =
        (truncated.data.get()[i / count] | terminated.data.get()[i / count]) != std::byte{0};
    const ArrayView expected = is_ignored ? before.view() : ours;
    if (integers ? expected.integer_at(i) == theirs.integer_at(i)
                 : std::memcmp(expected.data + i * item, theirs.data + i * item, item) == 0) {
      continue;
    }
    throw WireError("last_action of environment " + std::to_string(i / count) +
                    " is not the action that was sent");
  }
}

void Rollout::set_agent_outputs(int64_t t, const Nest<Array>& outputs) {
  if (!agent_outputs_) {
    agent_outputs_ = outputs.map([&](const Array& array) {
      Shape shape = array.shape;
      if (shape.size() < 2 || shape[0] != 1 || shape[1] != num_envs_) {
        throw std::invalid_argument("an output of the agent is " + array.description() +
                                    ", but should be [1, " + std::to_string(num_envs_) + ", ...]");
      }
      shape[0] = unroll_length_ + 1;
      Array buffer = make_array(array.dtype, std::move(shape), *pool_);
      std::memset(buffer.data.get(), 0, array.num_bytes());
      return buffer;
    });
  }
  if (!outputs.same_structure(*agent_outputs_)) {
    throw std::invalid_argument("the structure of the agent's outputs has changed");
  }
  const std::vector<Array> arrays = outputs.flatten();
  size_t i = 0;
  agent_outputs_->for_each([&](const Array& buffer) {
    const Array& array = arrays[i++];
    if (array.shape.empty() || array.shape[0] != 1 || !fits(array.view(), buffer, 1)) {
      throw std::invalid_argument("an output of the agent was " + buffer.row(0).description() +
                                  " and is now " + array.description());
    }
    copy_row(array.view(), buffer, t);
  });
}

// Replace the buffers by new ones of `num_rows` rows, the first of which is row t of the old ones.
void Rollout::begin_buffers(int64_t t, int64_t num_rows) {
  const auto begin = [&](const Array& old) {
    Shape shape = old.shape;
    shape[0] = num_rows;
    Array buffer = make_array(old.dtype, std::move(shape), *pool_);
    copy_row(old.row(t).view(), buffer, 0);
    return buffer;
  };
  for (auto& [key, nest] : rows_) nest = nest.map(begin);
  agent_outputs_ = agent_outputs_->map(begin);
}

Nest<Array> Rollout::finish() {
  Nest<Array> finished = Nest<Array>::Tuple{arrange(rows_), *agent_outputs_};
  begin_buffers(unroll_length_, 1);
  return finished;
}

void Rollout::begin() { begin_buffers(0, unroll_length_ + 1); }

}  // namespace torchbeast
