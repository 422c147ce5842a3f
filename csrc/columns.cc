// SPDX-License-Identifier: Apache-2.0
#include "columns.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace torchbeast {

int64_t count_columns(const Nest<Array>& nest, size_t batch_dim) {
  int64_t count = -1;
  nest.for_each([&](const Array& array) {
    if (array.shape.size() <= batch_dim) {
      throw std::invalid_argument("an array is " + array.description() +
                                  ", but the batch dimension is " + std::to_string(batch_dim) +
                                  ": it needs at least " + std::to_string(batch_dim + 1) +
                                  " dimensions");
    }
    const int64_t size = array.shape[batch_dim];
    if (count >= 0 && size != count) {
      throw std::invalid_argument("arrays of one nest have " + std::to_string(count) + " and " +
                                  std::to_string(size) + " columns along dimension " +
                                  std::to_string(batch_dim) + "; all must have the same number");
    }
    count = size;
  });
  if (count < 0) throw std::invalid_argument("the nest is empty: it has no array");
  return count;
}

Nest<Array> join_columns(const std::vector<NestColumns>& parts, size_t batch_dim,
                         MemoryPool& pool) {
  std::vector<std::vector<Columns>> leaves;  // for each leaf, its columns from all parts
  for (const NestColumns& part : parts) {
    if (!part.nest.same_structure(parts[0].nest)) {
      throw std::invalid_argument("nests of different structures cannot be joined");
    }
    size_t leaf = 0;
    part.nest.for_each([&](const Array& array) {
      if (leaf == leaves.size()) leaves.emplace_back();
      leaves[leaf++].push_back({array, part.begin, part.end});
    });
  }
  size_t leaf = 0;
  return parts.at(0).nest.map(
      [&](const Array&) { return concatenate(leaves[leaf++], batch_dim, pool); });
}

Nest<Array> repeat_columns(const Nest<Array>& nest, int64_t count, size_t batch_dim,
                           MemoryPool& pool) {
  if (nest.empty()) return nest;
  const NestColumns columns{nest, 0, count_columns(nest, batch_dim)};
  return join_columns(std::vector<NestColumns>(static_cast<size_t>(count), columns), batch_dim,
                      pool);
}

}  // namespace torchbeast
