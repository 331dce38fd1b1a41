// Threads that share the parts of one operation: see `Team`. kernels/cpu_build.py puts this into cpu.cpp.
//
// Which thread computes a part is left to chance, so no part may depend on it.

#include <fcntl.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
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

inline pid_t this_thread()
{
    static thread_local const pid_t number = (pid_t)syscall(SYS_gettid);
    return number;
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

// How long this thread has waited for a core although it could have run, as the system counts it; 0 where it says
// nothing. A thread's own; reading costs two microseconds.
class Delays {
  public:
    ~Delays()
    {
        if (file_ >= 0) close(file_);
    }

    i64 total_ns() const
    {
        char text[64];
        const ssize_t length = pread(file_, text, sizeof text - 1, 0);
        if (length <= 0) return 0;
        text[length] = 0;
        const char* second = std::strchr(text, ' ');  // the first is time with a core
        return second ? std::strtoll(second, nullptr, 10) : 0;
    }

  private:
    int file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
};

// Whether a core of this machine has nothing to do, as far as one can see from here. Reading costs some microseconds.
inline bool is_core_free()
{
    static const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    static const long num_cores = sysconf(_SC_NPROCESSORS_ONLN);
    char text[128];
    const ssize_t length = pread(file, text, sizeof text - 1, 0);
    if (length <= 0) return true;
    text[length] = 0;
    double average;
    long num_runnable;
    return std::sscanf(text, "%lf %lf %lf %ld/", &average, &average, &average, &num_runnable) != 4 ||
           num_runnable < num_cores;
}

// How many threads compute, decided by what is lost.
//
// A thread whose core somebody else has keeps the others waiting for the part it has begun; and a caller that
// shares its core, with somebody else or with a helper of its own, does not get on. So the share of time is measured
// in which the caller waited or could have run and did not, and the share of the work that helpers did. Where one
// thread less would have been quicker it is taken away. After a pause it is tried again, as soon as a core seems free
// or a long time has passed; the pause doubles while that fails.
class Adviser {
  public:
    // Threads for the next operation, of `most`; `is_free` says whether there is a core for one more.
    template <class IsFree> int number(int most, i64 now, const IsFree& is_free)
    {
        if (number_ > most || number_ == 0) forget(most);
        if (number_ < most && now >= retry_at_) {
            if (now - since_ < kPatienceNs && !is_free()) {
                retry_at_ = now + kPauseMinNs;
                return number_;
            }
            lost_with_fewer_ = lost_;
            change(number_ + 1, now);
            retry_at_ = now + pause_ns_;
        }
        return number_;
    }

    void forget(int most)
    {
        lost_with_fewer_ = 0;
        pause_ns_ = kPauseMinNs;
        change(most, 0);
    }

    // What share of a stretch of time was lost, with as many threads as `number` said, and what share of the work
    // helpers did in it.
    void observe(i64 now, double lost, double helped)
    {
        lost_ = lost;
        if (number_ == 1) return;
        const double one = helped / (number_ - 1);  // helper's work, which the others would have to do
        const double gain = 1 + kGain * one / (1 - one);
        const double wanted = 1 + kClearly * (gain - 1);
        if (gain * (1 - lost) < wanted * (1 - lost_with_fewer_)) {
            lost_with_fewer_ = 0;  // of fewer still nothing is known
            change(number_ - 1, now);
            retry_at_ = now + pause_ns_;
            pause_ns_ = std::min(2 * pause_ns_, kPauseMaxNs);
        } else if (now - since_ > kProvenNs) {
            pause_ns_ = kPauseMinNs;
        }
    }

  private:
    static constexpr i64 kPauseMinNs = 50'000'000, kPauseMaxNs = 1'600'000'000, kProvenNs = 500'000'000;
    static constexpr i64 kPatienceNs = 8'000'000'000;
    static constexpr double kClearly = 0.2;  // of the gain, for what was lost without being seen and by trying
    static constexpr double kGain = 0.5;     // threads take memory bandwidth from each other: of two, 1.5 is left

    void change(int number, i64 now)
    {
        number_ = number;
        since_ = now;
        lost_ = 0;
    }

    int number_ = 0;
    i64 since_ = 0, retry_at_ = 0, pause_ns_ = kPauseMinNs;
    double lost_ = 0, lost_with_fewer_ = 0;  // shares of time: last, and with one thread less
};

// Time in which operations follow each other with one number of threads, long enough to judge by.
class Window {
  public:
    // An operation by `number` threads begins. After a pause, with another number or for another caller, whose delays
    // are others, the window is a new one.
    void begin(i64 now, int number)
    {
        const pid_t caller = this_thread();
        if (number == number_ && caller == caller_ && now - end_ns_ < kPauseNs) return;
        number_ = number;
        caller_ = caller;
        restart(now);
    }

    // It has ended; what it took, how much of that the caller waited, and the share of it that helpers did.
    void end(i64 now, i64 spent_ns, i64 waited_ns, double helped)
    {
        waited_ns_ += waited_ns;
        spent_ns_ += spent_ns;
        helped_ns_ += helped * (double)spent_ns;
        end_ns_ = now;
    }

    bool is_long() const { return end_ns_ - begin_ns_ >= kLongNs; }

    // The share of its time that was lost.
    double lost() const
    {
        const i64 lost_ns = waited_ns_ + delays().total_ns() - delay_ns_;
        return std::min(1.0, std::max(0.0, (double)lost_ns / (double)(end_ns_ - begin_ns_)));
    }

    // The share of its work that helpers did.
    double helped() const { return helped_ns_ / (double)spent_ns_; }

    void restart(i64 now)
    {
        begin_ns_ = now;
        spent_ns_ = waited_ns_ = 0;
        helped_ns_ = 0;
        delay_ns_ = delays().total_ns();
    }

  private:
    static constexpr i64 kLongNs = 30'000'000, kPauseNs = 10'000'000;

    static const Delays& delays()
    {
        static thread_local const Delays of_this_thread;
        return of_this_thread;
    }

    int number_ = 0;
    pid_t caller_ = 0;
    i64 begin_ns_ = 0, end_ns_ = 0, spent_ns_ = 0, waited_ns_ = 0, delay_ns_ = 0;
    double helped_ns_ = 0;
};

// When a helper sleeps for a moment between two parts.
//
// Who loses his core within a part is waited for until he has it back, a few milliseconds later. Who has just slept
// of his own accord is not interrupted yet, and if it is somebody else's turn, loses the core with no part in his
// hands. (To yield gives way within one's own control group alone.) It is done only where cores have been lost.
class Rests {
  public:
    void between_parts()
    {
        const i64 now = now_ns();
        if (now - looked_at_ > kLookNs) {
            looked_at_ = now;
            rusage used;
            getrusage(RUSAGE_THREAD, &used);
            if (used.ru_nivcsw != num_losses_) contended_until_ = now + kContendedNs;
            num_losses_ = used.ru_nivcsw;
        }
        if (now >= contended_until_ || now - rested_at_ < kEveryNs) return;
        const timespec moment{0, 1000};  // and the timer's slack, 50 us
        nanosleep(&moment, nullptr);
        rested_at_ = now_ns();
    }

  private:
    static constexpr i64 kEveryNs = 700'000;  // less than the shortest slice of the system's scheduler
    static constexpr i64 kLookNs = 1'000'000, kContendedNs = 100'000'000;

    i64 looked_at_ = 0, contended_until_ = 0, rested_at_ = 0;
    decltype(rusage::ru_nivcsw) num_losses_ = 0;
};

// Keeps a helper off the caller's core, where it would only take time from him; the system's scheduler puts it there
// when others are busy.
class Distance {
  public:
    void keep_from(int core, pid_t caller)
    {
        if (core == core_ || core < 0 || core >= CPU_SETSIZE) return;
        core_ = core;
        cpu_set_t allowed;
        if (sched_getaffinity(caller, sizeof allowed, &allowed)) return;  // more cores than fit, or the caller has gone
        CPU_CLR(core, &allowed);
        if (CPU_COUNT(&allowed)) sched_setaffinity(0, sizeof allowed, &allowed);
    }

  private:
    int core_ = -1;
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
        const int number = std::min(adviser_.number(size, begin, is_core_free), 1 + helpers(size - 1));
        set_active(number - 1);
        window_.begin(begin, number);
        Shared shared;
        if (number == 1)
            for (i64 i = 0; i < count; i++) part(i);
        else
            shared = share(count, [](const void* work, i64 i) { (*(const Part*)work)(i); }, &part);
        judge(now_ns(), begin, shared);
        busy_.store(false, std::memory_order_release);
    }

  private:
    using Call = void (*)(const void*, i64);

    // Of an operation: how long its caller waited beyond the end of a part, and the share that helpers did.
    struct Shared {
        i64 waited_ns = 0;
        double helped = 0;
    };

    static constexpr i64 kIdleSpinNs = 100'000;  // so long a helper looks for parts before it sleeps,
    static constexpr i64 kWaitSpinNs = 50'000;   // and the caller for the end of the last ones
    static constexpr int kNiceness = 3;

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
    std::atomic<int> core_{-1};      // where the caller computes
    std::atomic<pid_t> caller_{0};
    Adviser adviser_;
    Window window_;
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

    void judge(i64 now, i64 begin, const Shared& shared)
    {
        window_.end(now, now - begin, shared.waited_ns, shared.helped);
        if (!window_.is_long()) return;
        adviser_.observe(now, window_.lost(), window_.helped());
        window_.restart(now);
    }

    Shared share(i64 count, Call call, const void* work)
    {
        call_ = call;
        work_ = work;
        count_ = count;
        num_done_.store(0, std::memory_order_relaxed);
        num_needed_.store(0, std::memory_order_relaxed);
        caller_.store(this_thread(), std::memory_order_relaxed);
        core_.store(sched_getcpu(), std::memory_order_relaxed);
        u64 ticket = ((ticket_.load(std::memory_order_relaxed) >> 32) + 1) << 32 | (u64)count;
        ticket_.store(ticket);
        round_.store(round_.load(std::memory_order_relaxed) + 1);
        if (const int asleep = num_asleep_.load()) wake(round_, (int)std::min<i64>(asleep, count - 1));

        const i64 begin = now_ns();
        i64 num_own = 0;
        for (i64 part; (part = take(ticket)) >= 0; num_own++, ticket = ticket_.load()) call(work, part);
        const i64 computed = now_ns(), part_ns = (computed - begin) / std::max<i64>(1, num_own);
        wait((uint32_t)(count - num_own), computed);
        return {std::max<i64>(0, now_ns() - computed - 2 * part_ns), 1 - (double)num_own / (double)count};
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
        give_way();
        Rests rests;
        Distance distance;
        for (;;) {
            for (uint32_t active; index >= (active = num_active_.load());) sleep_while(num_active_, active);
            compute(rests, distance);
            if (!is_work_soon()) {
                num_asleep_++;
                const uint32_t round = round_.load();
                if (!left_of(ticket_.load())) sleep_while(round_, round);
                num_asleep_--;
            }
        }
    }

    // Helpers weigh less than the caller, so that the system puts what else runs to them and not to him.
    static void give_way()
    {
        const id_t self = (id_t)this_thread();
        setpriority(PRIO_PROCESS, self, getpriority(PRIO_PROCESS, self) + kNiceness);
    }

    void compute(Rests& rests, Distance& distance)
    {
        u64 ticket = ticket_.load();
        distance.keep_from(core_.load(std::memory_order_relaxed), caller_.load(std::memory_order_relaxed));
        for (i64 part; (part = take(ticket)) >= 0; ticket = ticket_.load()) {
            call_(work_, part);
            const uint32_t done = num_done_.fetch_add(1) + 1;
            if (done == num_needed_.load()) wake(num_done_, 1);
            rests.between_parts();
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
