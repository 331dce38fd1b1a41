// Threads that share the parts of one operation: see `Team`. kernels/cpu_build.py puts this into cpu.cpp.
//
// Which thread computes a part is left to chance, so no part may depend on it.

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <system_error>
#include <thread>

namespace threads {

using i64 = int64_t;
using u64 = uint64_t;

inline i64 now_ns()
{
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Sleeps while `word` is `value`; may wake up for nothing.
inline void sleep_while(const std::atomic<uint32_t>& word, uint32_t value)
{
    syscall(SYS_futex, (const void*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

inline void wake(const std::atomic<uint32_t>& word, int count)
{
    syscall(SYS_futex, (const void*)&word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// How many threads compute, decided by what waiting costs.
//
// A thread that lost its core to somebody else's keeps the others waiting for the part it has begun, a slice of
// the system's scheduler at a time: with `n` threads one thread less is quicker where more than 1/n of the time
// is waited. So time lost is summed up over `kWindowNs`, a window with too much of it takes a thread away, and
// after a pause one is tried again. The pause doubles while that fails.
class Adviser {
  public:
    // Threads for the next operation, of `most`.
    int number(int most, i64 now)
    {
        if (number_ > most || number_ == 0) forget(most);
        if (number_ < most && now >= retry_at_) {
            number_++;
            computed_ns_ = lost_ns_ = 0;
            retry_at_ = now + pause_ns_;
            good_since_ = now;
        }
        return number_;
    }

    void forget(int most)
    {
        number_ = most;
        computed_ns_ = lost_ns_ = good_since_ = 0;
        pause_ns_ = kPauseMinNs;
    }

    // An operation by `number` threads took `spent_ns`, `lost_ns` of which somebody had to wait.
    void observe(i64 now, i64 spent_ns, i64 lost_ns)
    {
        computed_ns_ += spent_ns;
        lost_ns_ += lost_ns;
        if (computed_ns_ < kWindowNs) return;
        const bool is_bad = lost_ns_ * number_ > computed_ns_ * kBearable / 100;
        computed_ns_ = lost_ns_ = 0;
        if (is_bad) {
            number_ = std::max(1, number_ - 1);
            retry_at_ = now + pause_ns_;
            pause_ns_ = std::min(2 * pause_ns_, kPauseMaxNs);
        } else if (now - good_since_ > kProvenNs) {
            pause_ns_ = kPauseMinNs;
        }
    }

  private:
    static constexpr i64 kWindowNs = 30'000'000, kPauseMinNs = 50'000'000, kPauseMaxNs = 1'600'000'000;
    static constexpr i64 kProvenNs = 500'000'000;
    static constexpr i64 kBearable = 70;  // percent of what makes one thread less the quicker choice

    int number_ = 0;
    i64 computed_ns_ = 0, lost_ns_ = 0, good_since_ = 0, retry_at_ = 0, pause_ns_ = kPauseMinNs;
};

// The thread that calls `run`, and helpers of its own. Parts are taken one at a time from a common counter. The
// caller waits for parts that were begun, never for helpers: one that sleeps, lost its core or could not be
// started does less, and the others take the rest. So after a fork, where there are none, it computes alone.
class Team {
  public:
    // Threads an operation may have, the caller's included.
    void set_size(int size) { size_.store(std::max(1, size), std::memory_order_relaxed); }

    // Threads the last operation had that was shared.
    int number() const { return number_.load(std::memory_order_relaxed); }

    // part(i) for every i below `count`, in any order; parts write to different places. Of several callers at
    // once one has the helpers, the others compute alone.
    template <class Part> void run(i64 count, const Part& part)
    {
        const int size = size_.load(std::memory_order_relaxed);
        if (size == 1 || count < 2 || count > INT32_MAX || busy_.exchange(true, std::memory_order_acquire)) {
            for (i64 i = 0; i < count; i++) part(i);
            return;
        }
        const i64 begin = now_ns();
        const int number = std::min(adviser_.number(size, begin), 1 + helpers(size - 1));
        set_active(number - 1);
        if (number == 1)
            for (i64 i = 0; i < count; i++) part(i);
        else
            share(count, number, begin, [](const void* work, i64 i) { (*(const Part*)work)(i); }, &part);
        busy_.store(false, std::memory_order_release);
    }

  private:
    using Call = void (*)(const void*, i64);
    static constexpr i64 kIdleSpinNs = 100'000;  // so long a helper looks for parts before it sleeps,
    static constexpr i64 kWaitSpinNs = 50'000;   // and the caller for the end of the last ones
    static constexpr i64 kPartNs = 1'500'000;    // a part that takes longer than others and than this was interrupted

    // What is left of an operation: its number in the upper half, parts that nobody has begun in the lower. Both
    // in one word, so that a part is had of the operation that was looked at, or not at all.
    alignas(64) std::atomic<u64> ticket_{0};
    Call call_ = nullptr;         // these three may be read by whoever has a part
    const void* work_ = nullptr;
    i64 count_ = 0;
    alignas(64) std::atomic<uint32_t> num_done_{0};  // parts that helpers have computed
    std::atomic<uint32_t> num_needed_{0};            // so many of them the caller waits for; 0 = it does not
    alignas(64) std::atomic<uint32_t> round_{0};     // changes with every operation; helpers sleep on it
    std::atomic<uint32_t> num_active_{0};            // helpers that take part; those beyond sleep on it
    std::atomic<int> num_asleep_{0};                 // on `round_`
    alignas(64) std::atomic<bool> busy_{false};
    std::atomic<int> size_{1}, number_{1};
    Adviser adviser_;
    double ns_per_tick_ = 0;
    int num_helpers_ = 0;
    bool is_refused_ = false;

    static i64 left_of(u64 ticket) { return (i64)(ticket & UINT32_MAX); }

    // A part of what `ticket` says, or -1; `ticket` is read again until there is none.
    i64 take(u64& ticket)
    {
        while (left_of(ticket))
            if (ticket_.compare_exchange_weak(ticket, ticket - 1)) return count_ - left_of(ticket);
        return -1;
    }

    void share(i64 count, int number, i64 begin_ns, Call call, const void* work)
    {
        call_ = call;
        work_ = work;
        count_ = count;
        num_done_.store(0, std::memory_order_relaxed);
        num_needed_.store(0, std::memory_order_relaxed);
        u64 ticket = ((ticket_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | (u64)count;
        ticket_.store(ticket);
        round_.store(round_.load(std::memory_order_relaxed) + 1);
        if (const int asleep = num_asleep_.load()) wake(round_, (int)std::min<i64>(asleep, count - 1));

        const u64 begin = __rdtsc();
        u64 before = begin, longest = 0;
        i64 own = 0;
        for (i64 part; (part = take(ticket)) >= 0; own++, ticket = ticket_.load()) {
            call(work, part);
            const u64 after = __rdtsc();
            longest = std::max(longest, after - before);
            before = after;
        }
        const i64 computed_ns = now_ns();
        wait((uint32_t)(count - own), computed_ns);
        judge(count, number, own, begin_ns, computed_ns, (double)(before - begin), (double)longest);
    }

    // Until helpers have computed the parts they have begun.
    void wait(uint32_t needed, i64 begin_ns)
    {
        for (int turn = 0; num_done_.load() != needed; turn++) {
            _mm_pause();
            if (turn % 64 != 63 || now_ns() - begin_ns < kWaitSpinNs) continue;
            num_needed_.store(needed);
            for (uint32_t done; (done = num_done_.load()) != needed;) sleep_while(num_done_, done);
        }
    }

    // What of an operation's time was lost: waiting for more than the end of a part, and one part that took
    // far longer than others.
    void judge(i64 count, int number, i64 own, i64 begin_ns, i64 computed_ns, double ticks, double longest)
    {
        const i64 end_ns = now_ns();
        if (computed_ns - begin_ns > 100'000 && ticks > 0) ns_per_tick_ = (double)(computed_ns - begin_ns) / ticks;
        const double rest = own > 1 ? (ticks - longest) / (double)(own - 1) : longest * (number - 1) / (double)(count - 1);
        double lost_ns = std::max(0.0, (double)(end_ns - computed_ns) - 2 * rest * ns_per_tick_);
        if (longest * ns_per_tick_ > kPartNs && longest > 2 * rest) lost_ns += longest * ns_per_tick_;
        adviser_.observe(end_ns, end_ns - begin_ns, (i64)lost_ns);
    }

    void set_active(int count)
    {
        number_.store(count + 1, std::memory_order_relaxed);
        if (num_active_.exchange((uint32_t)count) < (uint32_t)count) wake(num_active_, INT_MAX);
    }

    // Helpers there are, after those that lack have been started, as far as the system lets us.
    int helpers(int wanted)
    {
        if (num_helpers_ >= wanted || is_refused_) return num_helpers_;
        sigset_t blocked, before;  // signals are for the threads of the program
        sigfillset(&blocked);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
        pthread_sigmask(SIG_SETMASK, &blocked, &before);
        try {
            for (; num_helpers_ < wanted; num_helpers_++)
                std::thread([this, index = (uint32_t)num_helpers_] { help(index); }).detach();
        } catch (const std::system_error&) {
            is_refused_ = true;  // a limit of processes or memory; it is not asked again at every operation
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return num_helpers_;
    }

    void help(uint32_t index)
    {
        pthread_setname_np(pthread_self(), "vorrang-compute");
        for (;;) {
            for (uint32_t active; index >= (active = num_active_.load());) sleep_while(num_active_, active);
            compute();
            if (!is_work_soon()) {
                num_asleep_++;
                const uint32_t round = round_.load();
                if (!left_of(ticket_.load())) sleep_while(round_, round);
                num_asleep_--;
            }
        }
    }

    void compute()
    {
        u64 ticket = ticket_.load();
        for (i64 part; (part = take(ticket)) >= 0; ticket = ticket_.load()) {
            call_(work_, part);
            const uint32_t done = num_done_.fetch_add(1) + 1;
            if (done == num_needed_.load()) wake(num_done_, 1);
        }
    }

    bool is_work_soon()
    {
        const i64 begin = now_ns();
        for (int turn = 1;; turn++) {
            if (left_of(ticket_.load(std::memory_order_relaxed))) return true;
            _mm_pause();
            if (turn % 64 == 0 && now_ns() - begin > kIdleSpinNs) return false;
        }
    }
};

}  // namespace threads
