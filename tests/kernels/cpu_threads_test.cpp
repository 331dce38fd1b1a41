// Cases of cpu_threads.hpp, one by its name each: exits with 0, or says what is wrong. See test_cpu_threads.py.

#include "cpu_threads.hpp"

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

// One window of operations of 5 ms each.
i64 window(Adviser& adviser, i64 now, i64 lost_percent)
{
    for (int i = 0; i < 6; i++) adviser.observe(now += 5 * kMs, 5 * kMs, 5 * kMs * lost_percent / 100);
    return now;
}

void drops()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    CHECK(adviser.number(2, now) == 2);
    for (int i = 0; i < 20; i++) now = window(adviser, now, 20);  // less than what a second thread brings
    CHECK(adviser.number(2, now) == 2);
    now = window(adviser, now, 45);
    CHECK(adviser.number(2, now) == 1);
}

void retries()
{
    Adviser adviser;
    i64 now = 1000 * kMs, pause = 50 * kMs;
    CHECK(adviser.number(2, now) == 2);
    for (int i = 0; i < 8; i++) {
        now = window(adviser, now, 90);
        CHECK(adviser.number(2, now) == 1);
        CHECK(adviser.number(2, now + pause - 1) == 1);
        CHECK(adviser.number(2, now += pause) == 2);
        pause = std::min(2 * pause, 1600 * kMs);
    }
}

void recovers()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    adviser.number(2, now);
    for (int i = 0; i < 6; i++) {
        now = window(adviser, now, 90) + 1600 * kMs;
        CHECK(adviser.number(2, now) == 2);
    }
    for (int i = 0; i < 40; i++) now = window(adviser, now, 0);  // 1.2 s without loss: the neighbour has gone
    CHECK(adviser.number(2, now) == 2);
    now = window(adviser, now, 90);
    CHECK(adviser.number(2, now) == 1);
    CHECK(adviser.number(2, now + 50 * kMs) == 2);  // the pause is the first again
}

void one_by_one()
{
    Adviser adviser;
    i64 now = 1000 * kMs;
    CHECK(adviser.number(4, now) == 4);
    for (int left = 3; left >= 1; left--) {
        now = window(adviser, now, 90);
        CHECK(adviser.number(4, now) == left);
    }
    now = window(adviser, now, 100);
    CHECK(adviser.number(4, now) == 1);  // never none
    CHECK(adviser.number(1, now) == 1);
    CHECK(Adviser().number(3, now) == 3);
}

int main(int, char** arguments)
{
    const struct { const char* name; void (*run)(); } cases[] = {
        {"parts", parts}, {"callers", callers}, {"after_fork", after_fork}, {"refused", refused},
        {"drops", drops}, {"retries", retries}, {"recovers", recovers}, {"one_by_one", one_by_one},
    };
    for (const auto& one : cases)
        if (!std::strcmp(one.name, arguments[1])) {
            one.run();
            std::_Exit(0);
        }
    std::_Exit(2);
}
