// Run by test_phases.py with the name of a check; exits with 0 if it holds.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "phases.h"

using headway::WorkQueue;

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition);  \
      std::_Exit(1);                                                              \
    }                                                                             \
  } while (0)

// A thread that stands still in its chunk holds up nobody: two loops later somebody lets it go on, and what it gives
// then, which is wrong, is not used.
void nobody_waits_for_a_thread() {
  at::set_num_threads(2);
  std::atomic<int> num_calls{0}, num_stored{0}, value{0}, seen{0};
  std::atomic<bool> may_go_on{false};
  WorkQueue queue;
  queue.add({1,
              [&](int64_t, void* result) {
                num_stored++;
                int given;
                std::memcpy(&given, result, sizeof given);
                value = given;
              },
              [&](int64_t, void* result) {
                int given = 7;
                if (num_calls++ == 0) {
                  while (!may_go_on) std::this_thread::yield();
                  given = 13;
                }
                std::memcpy(result, &given, sizeof given);
              },
              sizeof(int)});
  queue.add({1, [&](int64_t, void*) { seen = value.load(); }});
  queue.add({1, [&](int64_t, void*) { may_go_on = true; }});
  queue.run();
  CHECK(num_calls == 2 && num_stored == 1 && value == 7 && seen == 7);
}

// Random loops, in which each chunk reads the results of all chunks of the previous loop. Every chunk is committed once,
// even when its thread is interrupted, and no loop begins before the previous one has ended.
void every_part_is_finished_once(int num_threads, unsigned seed) {
  at::set_num_threads(num_threads);
  std::mt19937 random(seed);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  constexpr int kMaxChunks = 40;
  std::vector<std::vector<int64_t>> left(1 + 60, std::vector<int64_t>(kMaxChunks, 0));
  std::vector<std::vector<std::atomic<int>>> num_committed;
  std::vector<int64_t> num_chunks_of(left.size(), 0);
  WorkQueue queue;
  for (size_t index = 1; index < left.size(); index++) {
    const int64_t num_chunks = below(8) == 0 ? 0 : 1 + below(kMaxChunks);
    const int loops = below(4) == 0 ? 20'000 : below(300);
    num_committed.emplace_back(kMaxChunks);
    std::atomic<int>* committed = num_committed.back().data();
    const std::vector<int64_t>& before = left[index - 1];
    std::vector<int64_t>& now = left[index];
    const auto value_of = [&before, loops](int64_t chunk) {
      int64_t value = chunk + 1;
      for (int64_t each : before) value += each % 1000;
      volatile int spent = 0;
      for (int i = 0; i < loops; i++) spent = spent + 1;
      return value;
    };
    if (below(3) == 0)
      queue.add({num_chunks, [&now, committed, value_of](int64_t chunk, void*) {
        committed[chunk]++;
        now[chunk] = value_of(chunk);
      }});
    else
      queue.add({num_chunks,
                  [&now, committed](int64_t chunk, void* result) {
                    committed[chunk]++;
                    std::memcpy(&now[chunk], result, sizeof now[chunk]);
                  },
                  [value_of](int64_t chunk, void* result) {
                    const int64_t value = value_of(chunk);
                    std::memcpy(result, &value, sizeof value);
                  },
                  sizeof(int64_t)});
    num_chunks_of[index] = num_chunks;
  }
  queue.run();
  for (size_t index = 1; index < left.size(); index++) {
    int64_t before = 0;
    for (int64_t each : left[index - 1]) before += each % 1000;
    for (int64_t chunk = 0; chunk < kMaxChunks; chunk++) {
      const bool exists = chunk < num_chunks_of[index];
      CHECK(num_committed[index - 1][chunk] == exists);
      CHECK(left[index][chunk] == (exists ? chunk + 1 + before : 0));
    }
  }
}

int main(int argc, char** argv) {
  CHECK(argc == 2);
  if (std::strcmp(argv[1], "held") == 0) {
    nobody_waits_for_a_thread();
  } else {
    // More threads than processors, so that they interrupt each other.
    for (unsigned seed = 0; seed < 300; seed++) every_part_is_finished_once(1 + seed % 6, seed);
  }
}
