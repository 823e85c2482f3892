// Queue of parallel loops that a group of threads runs one after the other. Threads take the chunks of a loop
// dynamically, and a loop ends when its chunks are done. If a thread loses its processor during a chunk, another thread
// computes the chunk again (backup tasks of MapReduce, Dean and Ghemawat 2004). With a plain barrier after each loop,
// every such preemption would stop all threads. It still does so in loops whose chunks have no `compute`, and while a
// result is stored. The end of the queue waits for all threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {

constexpr int64_t kChunksPerThread = 8;  // chunks of a loop per thread: its end waits for one chunk per thread at most
constexpr int64_t kMaxResultBytes = 64 * 1024;  // of a chunk with `compute`; such a result stays in a near cache

// Loop over independent chunks of work.
struct ParallelFor {
  int64_t num_chunks;
  // Runs a chunk, and is called once per chunk. If there is `compute`, `commit` only stores its result.
  std::function<void(int64_t chunk, void* result)> commit;
  // Writes at most `num_result_bytes` to `result`, and changes nothing else. Several threads may call it for the same
  // chunk, even after later loops have overwritten its inputs; such a late result is not used. May be null.
  std::function<void(int64_t chunk, void* result)> compute = nullptr;
  int64_t num_result_bytes = 0;
};

// Queue of loops. The caller adds all loops and allocates their scratch memory, then calls `run`.
class WorkQueue {
 public:
  WorkQueue() : num_threads_(at::get_num_threads()) {}

  int64_t num_threads() const { return num_threads_; }

  void add(ParallelFor loop) {
    if (loop.num_chunks > 0) loops_.push_back(std::move(loop));
  }

  // Adds a loop of f(begin, end) over chunks of `num` rows. Each chunk but the last has at least `fewest` rows.
  template <typename F>
  void add_rows(int64_t num, int64_t fewest, F f) {
    const int64_t each = rows_per_chunk(num, fewest);
    add({(num + each - 1) / each,
         [=](int64_t chunk, void*) { f(chunk * each, std::min((chunk + 1) * each, num)); }});
  }

  // Returns the number of rows per chunk for `num` rows.
  int64_t rows_per_chunk(int64_t num, int64_t fewest) const {
    return num_threads_ == 1 ? std::max<int64_t>(1, num) : std::max(fewest, num / (num_threads_ * kChunksPerThread));
  }

  // Returns memory for the results that one loop passes to the next, aligned to a cache line. Later calls may return
  // the same memory.
  void* scratch(int64_t num_bytes) {
    if (scratch_.empty() || scratch_.back().num_bytes < num_bytes)
      scratch_.push_back({num_bytes, std::unique_ptr<Line[]>(new Line[num_bytes / sizeof(Line) + 1])});
    return scratch_.back().lines.get();
  }

  // Runs all loops. Their functions must not throw.
  void run() const {
    Progress progress(max_chunks());
    at::parallel_for(0, num_threads_, 1, [&](int64_t, int64_t) { Member(*this, progress).run(); });
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  // Progress of all threads. Chunks of all loops are numbered consecutively. A loop begins when all earlier chunks are
  // done.
  struct Progress {
    explicit Progress(int64_t max_chunks) : stored(max_chunks) {
      for (std::atomic<int64_t>& last : stored) last.store(-1, std::memory_order_relaxed);
    }
    // Returns true for exactly one caller per chunk `number`; that caller stores the chunk's result.
    bool may_store(int64_t number) {
      int64_t last = last_stored(number).load(std::memory_order_relaxed);
      return last < number && last_stored(number).compare_exchange_strong(last, number, std::memory_order_relaxed);
    }
    std::atomic<int64_t>& last_stored(int64_t number) { return stored[number % stored.size()]; }

    alignas(64) std::atomic<int64_t> num_taken{0};
    alignas(64) std::atomic<int64_t> num_done{0};
    alignas(64) std::vector<std::atomic<int64_t>> stored;  // chunk n uses entry n % size
  };

  // One thread's run through the loops.
  class Member {
   public:
    Member(const WorkQueue& work, Progress& progress)
        : work_(work), progress_(progress), result_(new Line[work.max_result_bytes() / sizeof(Line) + 1]) {}

    void run() {
      for (const ParallelFor& loop : work_.loops_) {
        run(loop);
        first_ += loop.num_chunks;
      }
    }

   private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds kLeastPatience{20}, kUntilYield{200};

    void run(const ParallelFor& loop) {
      const Clock::time_point began = Clock::now();
      int64_t num_mine = 0;
      for (int64_t number; take(loop, &number); num_mine++) run_chunk(loop, number);
      if (is_over(loop)) return;
      const Clock::time_point end = Clock::now();
      if (loop.compute) {
        // A thread that keeps its processor ends the last chunk within twice the mean time of a chunk.
        if (num_mine > 0) chunk_time_ = (end - began) / num_mine;
        if (wait(loop, end + std::max<Clock::duration>(kLeastPatience, 2 * chunk_time_))) return;
        for (int64_t number = first_; number < first_ + loop.num_chunks && !is_over(loop); number++)
          if (progress_.last_stored(number).load(std::memory_order_relaxed) < number) run_chunk(loop, number);
      }
      wait(loop, Clock::time_point::max());
    }

    bool take(const ParallelFor& loop, int64_t* number) {
      *number = progress_.num_taken.load(std::memory_order_relaxed);
      while (*number < first_ + loop.num_chunks)
        if (progress_.num_taken.compare_exchange_weak(*number, *number + 1, std::memory_order_relaxed)) return true;
      return false;
    }

    void run_chunk(const ParallelFor& loop, int64_t number) {
      const int64_t chunk = number - first_;
      if (loop.compute) {
        loop.compute(chunk, result_.get());
        if (!progress_.may_store(number)) return;  // Another thread was first.
      }
      loop.commit(chunk, result_.get());
      progress_.num_done.fetch_add(1, std::memory_order_acq_rel);
    }

    bool is_over(const ParallelFor& loop) const {
      return progress_.num_done.load(std::memory_order_acquire) >= first_ + loop.num_chunks;
    }

    // Waits until the loop is over, at most until `end`. Returns true if the loop is over.
    bool wait(const ParallelFor& loop, Clock::time_point end) const {
      const Clock::time_point began = Clock::now();
      while (!is_over(loop)) {
        for (int i = 0; i < 16; i++) pause();
        const Clock::time_point now = Clock::now();
        if (now > end) return is_over(loop);
        if (now - began > kUntilYield) std::this_thread::yield();
      }
      return true;
    }

    static void pause() {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }

    const WorkQueue& work_;
    Progress& progress_;
    std::unique_ptr<Line[]> result_;
    int64_t first_ = 0;  // the number of the loop's first chunk
    Clock::duration chunk_time_{};
  };

  int64_t max_chunks() const {
    int64_t most = 1;
    for (const ParallelFor& loop : loops_) most = std::max(most, loop.num_chunks);
    return most;
  }

  int64_t max_result_bytes() const {
    int64_t most = 0;
    for (const ParallelFor& loop : loops_) most = std::max(most, loop.num_result_bytes);
    return most;
  }

  // Scratch memory. All of it is kept until the queue's end, because a late thread may still read it.
  struct Scratch {
    int64_t num_bytes;
    std::unique_ptr<Line[]> lines;
  };
  int64_t num_threads_;
  std::vector<ParallelFor> loops_;
  std::vector<Scratch> scratch_;
};

}  // namespace headway
