// Work that threads do together, phase after phase. Nobody waits for a thread, only for the parts of work that are left:
// whoever is there takes the next part of the phase, and what a thread was at when it lost its processor another one
// does again (the backup tasks of MapReduce, Dean and Ghemawat 2004), so that it finds it done when it comes back. Where
// one barrier followed the other, each of these moments would hold up everybody. They still do in small phases, whose
// parts are not done again, and while a result is stored; and at the end of all phases everybody is waited for.
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

constexpr int64_t kPartsEach = 8;  // parts of a phase for each thread: what is waited for at its end is a part at most
constexpr int64_t kMostResultBytes = 64 * 1024;  // of a part that is to be done again: what stays near a processor

// One kind of work in parts, which have nothing to do with one another.
struct Phase {
  int64_t num_parts;
  // Does a part. Where there is `compute` it only stores what that gave, and is called for a part once.
  std::function<void(int64_t part, void* result)> finish;
  // Gives `num_result_bytes` or fewer, and changes nothing else: it may be called for a part by several threads, and
  // late, when what it reads is not there any more. What it gives then is not used. May be null.
  std::function<void(int64_t part, void* result)> compute = nullptr;
  int64_t num_result_bytes = 0;
};

// Phases are noted first, with all memory that they need, and then run.
class Phases {
 public:
  Phases() : num_threads_(at::get_num_threads()) {}

  int64_t num_threads() const { return num_threads_; }

  void add(Phase phase) {
    if (phase.num_parts > 0) phases_.push_back(std::move(phase));
  }

  // f(begin, end) for parts of `num` rows, at least `fewest` in each but the last.
  template <typename F>
  void add_rows(int64_t num, int64_t fewest, F f) {
    const int64_t each = rows_of_part(num, fewest);
    add({(num + each - 1) / each,
         [=](int64_t part, void*) { f(part * each, std::min((part + 1) * each, num)); }});
  }

  // How many of `num` rows a part has.
  int64_t rows_of_part(int64_t num, int64_t fewest) const {
    return num_threads_ == 1 ? std::max<int64_t>(1, num) : std::max(fewest, num / (num_threads_ * kPartsEach));
  }

  // Memory for what a phase leaves to the one after it, until the next call; it begins with a cache line.
  void* scratch(int64_t num_bytes) {
    if (scratch_.empty() || scratch_.back().num_bytes < num_bytes)
      scratch_.push_back({num_bytes, std::unique_ptr<Line[]>(new Line[num_bytes / sizeof(Line) + 1])});
    return scratch_.back().lines.get();
  }

  // Does everything; what was noted must not throw.
  void run() const {
    Progress progress(most_parts());
    at::parallel_for(0, num_threads_, 1, [&](int64_t, int64_t) { Member(*this, progress).run(); });
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  // Parts of all phases are numbered in one row. A phase begins when all parts before it are done.
  struct Progress {
    explicit Progress(int64_t most_parts) : stored(most_parts) {
      for (std::atomic<int64_t>& last : stored) last.store(-1, std::memory_order_relaxed);
    }
    // Whether the caller is the one that stores the result of part `number`.
    bool may_store(int64_t number) {
      int64_t last = last_stored(number).load(std::memory_order_relaxed);
      return last < number && last_stored(number).compare_exchange_strong(last, number, std::memory_order_relaxed);
    }
    std::atomic<int64_t>& last_stored(int64_t number) { return stored[number % stored.size()]; }

    alignas(64) std::atomic<int64_t> num_taken{0};
    alignas(64) std::atomic<int64_t> num_done{0};
    alignas(64) std::vector<std::atomic<int64_t>> stored;  // each for one part of every phase, in turn
  };

  // A thread on its way through the phases.
  class Member {
   public:
    Member(const Phases& work, Progress& progress)
        : work_(work), progress_(progress), result_(new Line[work.most_result_bytes() / sizeof(Line) + 1]) {}

    void run() {
      for (const Phase& phase : work_.phases_) {
        run(phase);
        first_ += phase.num_parts;
      }
    }

   private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds kLeastPatience{20}, kUntilYield{200};

    void run(const Phase& phase) {
      const Clock::time_point began = Clock::now();
      int64_t num_mine = 0;
      for (int64_t number; take(phase, &number); num_mine++) perform(phase, number);
      if (is_over(phase)) return;
      const Clock::time_point end = Clock::now();
      if (phase.compute) {
        // Twice what a part took is longer than whoever has the last one needs, if it has its processor.
        if (num_mine > 0) part_time_ = (end - began) / num_mine;
        if (wait(phase, end + std::max<Clock::duration>(kLeastPatience, 2 * part_time_))) return;
        for (int64_t number = first_; number < first_ + phase.num_parts && !is_over(phase); number++)
          if (progress_.last_stored(number).load(std::memory_order_relaxed) < number) perform(phase, number);
      }
      wait(phase, Clock::time_point::max());
    }

    bool take(const Phase& phase, int64_t* number) {
      *number = progress_.num_taken.load(std::memory_order_relaxed);
      while (*number < first_ + phase.num_parts)
        if (progress_.num_taken.compare_exchange_weak(*number, *number + 1, std::memory_order_relaxed)) return true;
      return false;
    }

    void perform(const Phase& phase, int64_t number) {
      const int64_t part = number - first_;
      if (phase.compute) {
        phase.compute(part, result_.get());
        if (!progress_.may_store(number)) return;  // Somebody else did it meanwhile.
      }
      phase.finish(part, result_.get());
      progress_.num_done.fetch_add(1, std::memory_order_acq_rel);
    }

    bool is_over(const Phase& phase) const {
      return progress_.num_done.load(std::memory_order_acquire) >= first_ + phase.num_parts;
    }

    // Until the phase is over, at most until `end`; whether it is over.
    bool wait(const Phase& phase, Clock::time_point end) const {
      const Clock::time_point began = Clock::now();
      while (!is_over(phase)) {
        for (int i = 0; i < 16; i++) pause();
        const Clock::time_point now = Clock::now();
        if (now > end) return is_over(phase);
        if (now - began > kUntilYield) std::this_thread::yield();
      }
      return true;
    }

    static void pause() {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }

    const Phases& work_;
    Progress& progress_;
    std::unique_ptr<Line[]> result_;
    int64_t first_ = 0;  // the number of the phase's first part
    Clock::duration part_time_{};
  };

  int64_t most_parts() const {
    int64_t most = 1;
    for (const Phase& phase : phases_) most = std::max(most, phase.num_parts);
    return most;
  }

  int64_t most_result_bytes() const {
    int64_t most = 0;
    for (const Phase& phase : phases_) most = std::max(most, phase.num_result_bytes);
    return most;
  }

  // All that was given out, for a thread that comes back late may still read it.
  struct Scratch {
    int64_t num_bytes;
    std::unique_ptr<Line[]> lines;
  };
  int64_t num_threads_;
  std::vector<Phase> phases_;
  std::vector<Scratch> scratch_;
};

}  // namespace headway
