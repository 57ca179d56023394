// SPDX-License-Identifier: GPL-2.0-only
/*
 * The only program in a KVM guest. Its processes compute the same result, and it writes and checks memory, for SECONDS or
 * until a line comes on the console. It prints there the number of CPUs, the number of processes, and the number of
 * errors: processes with another result, and pages with other contents. It prints its progress in between. With the
 * argument "panic" its kernel panics in the end.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define WORDS 512
#define PAGES 4096
#define OFTEN 50

static unsigned long memory[PAGES][WORDS];

static int result(void)
{
	int status = 0, i;
	volatile unsigned long x = 1;
	pid_t child = fork();

	if (child < 0)
		return -1;
	if (child == 0) {
		for (i = 0; i < 2000; i++)
			x = x * 6364136223846793005UL + 1;
		_exit(x % 251);
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* A page holds the number of the last pass that wrote it; the first pass is 1. */
static int page_is_wrong(unsigned long pass, int write)
{
	unsigned long *page = memory[pass % PAGES];
	unsigned long expected = pass > PAGES ? pass - PAGES : 0;
	int wrong = 0, i;

	for (i = 0; i < WORDS; i++) {
		wrong |= page[i] != expected;
		if (write)
			page[i] = pass;
	}
	return wrong;
}

static int is_over(time_t end)
{
	struct pollfd console = { .fd = 0, .events = POLLIN };

	return time(NULL) >= end || poll(&console, 1, 0) > 0;
}

static void panic(void)
{
	int trigger = open("/proc/sysrq-trigger", O_WRONLY);

	if (write(trigger, "c", 1) < 0)
		perror("sysrq-trigger");
}

int main(int argc, char **argv)
{
	time_t end = time(NULL) + SECONDS;
	int cpus = 0, wrong = 0, right, i;
	unsigned long processes = 0;
	char line[256];
	FILE *info;

	mkdir("/proc", 0755);
	mount("proc", "/proc", "proc", 0, NULL);
	info = fopen("/proc/cpuinfo", "r");
	while (info && fgets(line, sizeof(line), info))
		cpus += !strncmp(line, "processor", 9);
	right = result();
	printf("begins\n");
	for (; !is_over(end); processes++) {
		wrong += result() != right;
		wrong += page_is_wrong(processes + 1, 1);
		if (processes % OFTEN == OFTEN - 1) {
			printf("so far %lu\n", processes + 1);
			fflush(stdout);
		}
	}
	for (i = 1; i <= PAGES; i++)
		wrong += page_is_wrong(processes + i, 0);
	printf("cpus %d processes %lu wrong %d\n", cpus, processes, wrong);
	fflush(stdout);
	tcdrain(1);
	if (argc > 1 && !strcmp(argv[1], "panic"))
		panic();
	return reboot(RB_POWER_OFF);
}
