// SPDX-License-Identifier: Apache-2.0
// Columns of nests of arrays: queues and batchers count, join and split them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "array.h"
#include "nest.h"

namespace torchbeast {

// The size of `nest` along `batch_dim`, which all its arrays share.
//
// Throws std::invalid_argument for a nest without arrays, for an array with too few dimensions, and
// where sizes differ.
int64_t count_columns(const Nest<Array>& nest, size_t batch_dim);

struct NestColumns {
  Nest<Array> nest;
  int64_t begin;
  int64_t end;
};

// Join columns of nests of one structure in new memory; throws std::invalid_argument where
// structures, dtypes or other dimensions differ.
Nest<Array> join_columns(const std::vector<NestColumns>& parts, size_t batch_dim, MemoryPool& pool);

// The columns of `nest`, repeated `count` times.
Nest<Array> repeat_columns(const Nest<Array>& nest, int64_t count, size_t batch_dim,
                           MemoryPool& pool);

}  // namespace torchbeast
