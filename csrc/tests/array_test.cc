// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "check.h"

namespace torchbeast {
namespace {

TEST(the_pool_gives_aligned_memory) {
  const auto pool = new_pool();
  for (const size_t size : {0, 1, 63, 64, 65, 1000, 7056, 100000}) {
    const MemoryPool::Block block = pool->take(size);
    CHECK(reinterpret_cast<uintptr_t>(block.get()) % 64 == 0);
    std::memset(block.get(), 1, size);
  }
}

TEST(a_block_is_used_again_when_its_last_pointer_is_gone_and_not_before) {
  const auto pool = new_pool();
  MemoryPool::Block first = pool->take(1000);
  const std::byte* const address = first.get();
  MemoryPool::Block copy = first;
  first.reset();
  CHECK(pool->take(1000).get() != address);
  copy.reset();
  std::set<const std::byte*> seen;
  std::vector<MemoryPool::Block> blocks;
  for (int i = 0; i < 2; ++i) {  // there are two free ones now
    blocks.push_back(pool->take(1000));
    seen.insert(blocks.back().get());
  }
  CHECK(seen.count(address) == 1);
}

TEST(a_block_may_outlive_its_pool) {
  auto pool = new_pool();
  const MemoryPool::Block block = pool->take(1000);
  pool.reset();
  std::memset(block.get(), 1, 1000);
}

TEST(the_pool_takes_memory_from_the_allocator_it_is_given) {
  int allocated = 0;
  int freed = 0;
  {
    const auto pool = std::make_shared<MemoryPool>([&](size_t size) {
      ++allocated;
      return MemoryPool::Block(new std::byte[size], [&](const std::byte* pointer) {
        ++freed;
        delete[] pointer;
      });
    });
    pool->take(1000);
    pool->take(1000);
    CHECK(allocated == 1 && freed == 0);
  }
  CHECK(freed == 1);
}

TEST(blocks_that_threads_hand_each_other_are_one_users_alone_and_all_are_freed) {
  std::atomic<int64_t> num_blocks{0};
  auto pool = std::make_shared<MemoryPool>([&](size_t size) {
    ++num_blocks;
    return MemoryPool::Block(new std::byte[size], [&](const std::byte* block) {
      delete[] block;
      --num_blocks;
    });
  });
  struct Slot {
    std::mutex mutex;
    MemoryPool::Block block;
    size_t size = 0;
    int value = 0;
  };
  std::array<Slot, 8> slots;
  Threads threads;
  start(&threads, 4, [&slots, pool](size_t t) {
    std::minstd_rand random(static_cast<unsigned>(t + 1));
    for (int i = 0; i < 5000; ++i) {
      size_t size = random() % (size_t{1} << random() % 14);
      int value = static_cast<int>(random() % 256);
      MemoryPool::Block block = pool->take(size);
      std::memset(block.get(), value, size);
      Slot& slot = slots[random() % slots.size()];
      {
        std::lock_guard lock(slot.mutex);
        slot.block.swap(block);
        std::swap(slot.size, size);
        std::swap(slot.value, value);
      }
      for (size_t k = 0; k < size; ++k) CHECK(block.get()[k] == std::byte(value));
    }
  });
  pool.reset();  // the threads and the blocks keep it alive
  join(&threads);
  CHECK(num_blocks > 0);
  for (Slot& slot : slots) slot.block.reset();
  CHECK(num_blocks == 0);
}

TEST(every_dtype_has_a_size_and_a_name) {
  CHECK(size_of(DType::kBool) == 1 && size_of(DType::kUInt16) == 2 && size_of(DType::kInt32) == 4);
  CHECK(size_of(DType::kFloat64) == 8 && size_of(DType::kBFloat16) == 2);
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(DType::kBFloat16); ++i) {
    names.insert(name_of(static_cast<DType>(i)));
  }
  CHECK(names.size() == 13 && names.count("float16") == 1 && names.count("bfloat16") == 1);
  CHECK((Array{DType::kFloat32, {3, 4}, nullptr}.description() == "float32[3, 4]"));
  CHECK((Array{DType::kBool, {}, nullptr}.description() == "bool[]"));
}

TEST(a_row_is_a_view) {
  const Array array = int64_array({3, 2}, {0, 1, 2, 3, 4, 5});
  const Array row = array.row(1);
  CHECK((row.shape == Shape{1, 2}));
  CHECK((values_of(row) == Values{2, 3}));
  CHECK(row.data.get() == array.data.get() + 16);
}

TEST(concatenate_joins_columns_along_any_dimension) {
  const auto pool = new_pool();
  const Array a = int64_array({2, 2}, {1, 2, 3, 4});
  const Array b = int64_array({2, 3}, {5, 6, 7, 8, 9, 10});
  const Array joined = concatenate({{a, 0, 2}, {b, 0, 3}}, 1, *pool);
  CHECK((joined.shape == Shape{2, 5}));
  CHECK((values_of(joined) == Values{1, 2, 5, 6, 7, 3, 4, 8, 9, 10}));

  const Array below = concatenate({{a, 0, 2}, {a, 1, 2}}, 0, *pool);
  CHECK((below.shape == Shape{3, 2}));
  CHECK((values_of(below) == Values{1, 2, 3, 4, 3, 4}));

  const Array deep = int64_array({2, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  CHECK((values_of(concatenate({{deep, 1, 2}, {deep, 0, 1}}, 1, *pool)) ==
         Values{3, 4, 1, 2, 7, 8, 5, 6}));
}

TEST(concatenate_joins_elements_of_any_size) {
  const auto pool = new_pool();
  for (const DType dtype : {DType::kUInt8, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    Array a = make_array(dtype, {2, 3}, *pool);
    const size_t item = size_of(dtype);
    for (size_t k = 0; k < a.num_bytes(); ++k) a.data.get()[k] = std::byte(k / item);
    const Array joined = concatenate({{a, 1, 3}, {a, 0, 1}}, 1, *pool);
    size_t k = 0;
    for (const int element : {1, 2, 0, 4, 5, 3}) {
      for (size_t i = 0; i < item; ++i) CHECK(joined.data.get()[k++] == std::byte(element));
    }
    CHECK(joined.num_bytes() == k);
  }
}

TEST(concatenate_takes_parts_and_empty_ones) {
  const auto pool = new_pool();
  const Array a = int64_array({2, 3}, {1, 2, 3, 4, 5, 6});
  const Array part = concatenate({{a, 1, 3}, {a, 2, 2}, {a, 0, 1}}, 1, *pool);
  CHECK((part.shape == Shape{2, 3}));
  CHECK((values_of(part) == Values{2, 3, 1, 5, 6, 4}));
  const Array none = concatenate({{int64_array({0, 3}, {}), 0, 3}}, 1, *pool);
  CHECK((none.shape == Shape{0, 3}));
}

TEST(concatenate_refuses_what_does_not_fit) {
  const auto pool = new_pool();
  const Array a = int64_array({2, 2}, {1, 2, 3, 4});
  const Array other_dtype{DType::kUInt64, a.shape, a.data};
  const Array other_rows = int64_array({1, 2}, {1, 2});
  const Array other_rank = int64_array({2, 2, 1}, {1, 2, 3, 4});
  for (const Array& b : {other_dtype, other_rows, other_rank}) {
    CHECK_THROWS(std::invalid_argument, concatenate({{a, 0, 2}, {b, 0, 2}}, 1, *pool));
    CHECK_THROWS(std::invalid_argument, concatenate({{b, 0, 2}, {a, 0, 2}}, 1, *pool));
  }
}

TEST(copy_strided_follows_any_strides) {
  const auto pool = new_pool();
  const Array a = int64_array({2, 3}, {1, 2, 3, 4, 5, 6});
  const auto copy = [&](const Shape& shape, const std::vector<int64_t>& strides, size_t first) {
    return values_of(copy_strided(DType::kInt64, shape, strides, a.data.get() + 8 * first, *pool));
  };
  CHECK((copy({3, 2}, {1, 3}, 0) == Values{1, 4, 2, 5, 3, 6}));    // transposed
  CHECK((copy({2, 3}, {-3, -1}, 5) == Values{6, 5, 4, 3, 2, 1}));  // backwards
  CHECK((copy({2, 3}, {0, 1}, 3) == Values{4, 5, 6, 4, 5, 6}));    // broadcast
  CHECK((copy({2, 2}, {3, 2}, 0) == Values{1, 3, 4, 6}));          // every other one
  CHECK((copy({}, {}, 4) == Values{5}));                           // 0-d
  CHECK((copy({2, 0}, {3, 1}, 0).empty()));
}

}  // namespace
}  // namespace torchbeast
