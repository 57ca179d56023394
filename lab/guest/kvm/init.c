// SPDX-License-Identifier: GPL-2.0-only
/*
 * All that runs in a virtual machine of KVM's: processes that compute the same, for SECONDS. It says on the console how
 * many CPUs there are, how many processes there were, and how many of them came to another result.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

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

int main(void)
{
	time_t end = time(NULL) + SECONDS;
	int cpus = 0, processes = 0, wrong = 0, right;
	char line[256];
	FILE *info;

	mkdir("/proc", 0755);
	mount("proc", "/proc", "proc", 0, NULL);
	info = fopen("/proc/cpuinfo", "r");
	while (info && fgets(line, sizeof(line), info))
		cpus += !strncmp(line, "processor", 9);
	right = result();
	for (; time(NULL) < end; processes++)
		wrong += result() != right;
	printf("cpus %d processes %d wrong %d\n", cpus, processes, wrong);
	fflush(stdout);
	return reboot(RB_POWER_OFF);
}
