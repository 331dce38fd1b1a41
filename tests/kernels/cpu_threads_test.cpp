// Cases of cpu_threads.hpp, one by its name each: exits with 0, or says what is wrong. See test_cpu_threads.py.

#include "cpu_threads.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace threads;

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
            std::_Exit(1);                                                      \
        }                                                                       \
    } while (0)

constexpr i64 kMs = 1'000'000;

// Every part exactly once.
void run_once(Team& team, i64 count)
{
    std::vector<std::atomic<int>> seen((size_t)count);
    team.run(count, [&](i64 part) { seen[(size_t)part]++; });
    for (i64 i = 0; i < count; i++) CHECK(seen[(size_t)i] == 1);
}

void parts()
{
    Team& team = *new Team;
    for (int size = 1; size <= 8; size++) {
        team.set_size(size);
        for (int round = 0; round < 300; round++) run_once(team, round % 67);
        CHECK(team.number() <= size);
    }
}

void callers()
{
    Team& team = *new Team;
    team.set_size(3);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; i++)
        callers.emplace_back([&] {
            for (int round = 0; round < 300; round++) run_once(team, 1 + round % 40);
        });
    for (auto& caller : callers) caller.join();
}

void after_fork()
{
    Team& team = *new Team;
    team.set_size(4);
    for (int round = 0; round < 100; round++) run_once(team, 50);
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        for (int round = 0; round < 100; round++) run_once(team, 50);
        std::_Exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    run_once(team, 50);
}

void refused()
{
    rlimit none{1, 1};
    CHECK(setrlimit(RLIMIT_AS, &none) == 0);  // no stack for a thread
    bool is_refused = false;
    try {
        std::thread([] {}).detach();
    } catch (const std::system_error&) {
        is_refused = true;
    }
    CHECK(is_refused);
    static Team team;
    static int seen[100];
    team.set_size(4);
    for (int round = 1; round <= 20; round++) {
        team.run(100, [&](i64 part) { seen[part]++; });
        for (int times : seen) CHECK(times == round);
    }
    CHECK(team.number() == 1);
}

const auto always = [] { return true; };

// A window of 30 ms; two threads share alike unless it is said otherwise.
i64 window(Adviser& adviser, i64 now, int lost_percent, int helped_percent = 50)
{
    adviser.observe(now += 30 * kMs, lost_percent / 100.0, helped_percent / 100.0);
    return now;
}

void drops()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    CHECK(adviser.number(2, now, always) == 2);
    for (int i = 0; i < 20; i++) now = window(adviser, now, 20);  // less than what a second thread brings
    CHECK(adviser.number(2, now, always) == 2);
    now = window(adviser, now, 45);
    CHECK(adviser.number(2, now, always) == 1);
}

void retries()
{
    Adviser adviser;
    i64 now = 1000 * kMs, pause = 50 * kMs;
    CHECK(adviser.number(2, now, always) == 2);
    for (int i = 0; i < 8; i++) {
        now = window(adviser, now, 90);
        CHECK(adviser.number(2, now, always) == 1);
        CHECK(adviser.number(2, now + pause - 1, always) == 1);
        CHECK(adviser.number(2, now += pause, always) == 2);
        pause = std::min(2 * pause, 1600 * kMs);
    }
}

void recovers()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    adviser.number(2, now, always);
    for (int i = 0; i < 6; i++) {
        now = window(adviser, now, 90) + 1600 * kMs;
        CHECK(adviser.number(2, now, always) == 2);
    }
    for (int i = 0; i < 40; i++) now = window(adviser, now, 0);  // 1.2 s without loss: the neighbour has gone
    CHECK(adviser.number(2, now, always) == 2);
    now = window(adviser, now, 90);
    CHECK(adviser.number(2, now, always) == 1);
    CHECK(adviser.number(2, now + 50 * kMs, always) == 2);  // the pause is the first again
}

// What one thread less loses just as well is no reason to have one less.
void lost_anyway()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    CHECK(adviser.number(2, now, always) == 2);
    now = window(adviser, now, 50);
    CHECK(adviser.number(2, now, always) == 1);
    now = window(adviser, now, 40);
    CHECK(adviser.number(2, now += 50 * kMs, always) == 2);
    now = window(adviser, now, 50);  // (1 - 0.5) * 1.5 of the speed, to 1 - 0.4
    CHECK(adviser.number(2, now, always) == 2);
    now = window(adviser, now, 65);
    CHECK(adviser.number(2, now, always) == 1);
}

// With many threads the last one brings little, so that less lost is too much.
void many()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    CHECK(adviser.number(16, now, always) == 16);
    now = window(adviser, now, 2, 94);
    CHECK(adviser.number(16, now, always) == 16);
    now = window(adviser, now, 4, 94);
    CHECK(adviser.number(16, now, always) == 15);
}

// While no core is free nothing is tried, but for once in a long time.
void patience()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    const auto never = [] { return false; };
    CHECK(adviser.number(2, now, never) == 2);
    now = window(adviser, now, 90);
    const i64 dropped = now;
    for (; now < dropped + 7900 * kMs; now += 10 * kMs) CHECK(adviser.number(2, now, never) == 1);
    CHECK(adviser.number(2, now += 200 * kMs, never) == 2);
    now = window(adviser, now, 90);
    CHECK(adviser.number(2, now, always) == 1);
    CHECK(adviser.number(2, now + 99 * kMs, always) == 1);
    CHECK(adviser.number(2, now + 100 * kMs, always) == 2);
}

// Helpers that do little are not worth what they cost.
void little_help()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    CHECK(adviser.number(2, now, always) == 2);
    now = window(adviser, now, 25);
    CHECK(adviser.number(2, now, always) == 2);
    now = window(adviser, now, 5, 20);
    CHECK(adviser.number(2, now, always) == 2);
    now = window(adviser, now, 25, 20);
    CHECK(adviser.number(2, now, always) == 1);
}

void windows()
{
    Window window;
    i64 now = 1000 * kMs;
    const auto operation = [&](int number, int ms, int waited_ms, double helped) {
        window.begin(now, number);
        window.end(now += ms * kMs, ms * kMs, waited_ms * kMs, helped);
    };
    for (int i = 0; i < 5; i++) operation(2, 5, 1, 0.5);
    CHECK(!window.is_long());
    operation(2, 5, 1, 0.2);
    CHECK(window.is_long());
    CHECK(std::abs(window.lost() - 0.2) < 0.05);  // and what this thread had to wait for its core just now
    CHECK(std::abs(window.helped() - 0.45) < 0.001);
    window.restart(now);
    operation(2, 29, 29, 0.5);
    now += 11 * kMs;  // a pause
    operation(2, 29, 0, 0.5);
    CHECK(!window.is_long());
    operation(1, 29, 0, 0);  // another number
    CHECK(!window.is_long());
    operation(1, 1, 0, 0);
    CHECK(window.is_long() && window.lost() < 0.05 && window.helped() == 0);
}

// Two threads that want one core wait for it half of the time, each.
void delays()
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    std::atomic<bool> is_over{false};
    std::thread other([&] {
        while (!is_over) continue;
    });
    const Delays mine;
    const i64 begin = now_ns(), before = mine.total_ns();
    while (now_ns() - begin < 400 * kMs) continue;
    const i64 delay = mine.total_ns() - before;
    is_over = true;
    other.join();
    CHECK(delay > 100 * kMs && delay < 400 * kMs);
}

void one_by_one()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    CHECK(adviser.number(4, now, always) == 4);
    for (int left = 3; left >= 1; left--) {
        now = window(adviser, now, 90);
        CHECK(adviser.number(4, now, always) == left);
    }
    now = window(adviser, now, 100);
    CHECK(adviser.number(4, now, always) == 1);  // never none
    CHECK(adviser.number(1, now, always) == 1);
    CHECK(Adviser().number(3, now, always) == 3);
}

int main(int, char** arguments)
{
    const struct { const char* name; void (*run)(); } cases[] = {
        {"parts", parts}, {"callers", callers}, {"after_fork", after_fork}, {"refused", refused},
        {"drops", drops}, {"retries", retries}, {"recovers", recovers}, {"one_by_one", one_by_one},
        {"lost_anyway", lost_anyway}, {"many", many}, {"patience", patience}, {"little_help", little_help}, {"windows", windows}, {"delays", delays},
    };
    for (const auto& one : cases)
        if (!std::strcmp(one.name, arguments[1])) {
            one.run();
            std::_Exit(0);
        }
    std::_Exit(2);
}
