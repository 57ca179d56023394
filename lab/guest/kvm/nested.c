// SPDX-License-Identifier: GPL-2.0-only
/*
 * The only program in a guest that is itself a KVM host. It loads KVM, and lets a virtual machine without a kernel count
 * for SECONDS or until a line comes on the console, in memory and to a port, as `counter` does. It prints its progress
 * there, and the number of errors in the end.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define MEMORY	0x100000
#define START	0x1000
#define DATA	0x20000
#define OFTEN	50

/* mov dx, 0x3f8; again: inc al; mov [di], al; cmp [di], al; jne wrong; add di, 0xffd; out dx, al; jmp again; wrong: hlt */
static const unsigned char program[] = {
	0xba, 0xf8, 0x03, 0xfe, 0xc0, 0x88, 0x05, 0x38, 0x05, 0x75, 0x07, 0x81, 0xc7, 0xfd, 0x0f, 0xee,
	0xeb, 0xf1, 0xf4,
};

static void die(const char *what)
{
	printf("failed: %s: %s\n", what, strerror(errno));
	fflush(stdout);
	tcdrain(1);
	reboot(RB_POWER_OFF);
	exit(1);
}

/* The file names are in loading order. */
static void load_kvm(void)
{
	struct dirent **names;
	int count = scandir("/modules", &names, NULL, alphasort), i, file;
	char path[300];

	for (i = 0; i < count; i++) {
		if (names[i]->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/modules/%s", names[i]->d_name);
		file = open(path, O_RDONLY | O_CLOEXEC);
		if (syscall(SYS_finit_module, file, "", 0) && errno != EEXIST)
			die(path);
		close(file);
	}
}

struct guest {
	int cpu;
	struct kvm_run *run;
};

static struct guest make(void)
{
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm = ioctl(kvm, KVM_CREATE_VM, 0);
	struct kvm_userspace_memory_region region = { .memory_size = MEMORY };
	struct kvm_regs registers = { .rip = START, .rflags = 2 };
	struct kvm_sregs segments;
	struct guest guest;
	void *memory;

	memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	memcpy(memory + START, program, sizeof(program));
	region.userspace_addr = (unsigned long)memory;
	guest.cpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	if (guest.cpu < 0 || ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region))
		die("making a virtual machine");
	guest.run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED,
			 guest.cpu, 0);
	ioctl(guest.cpu, KVM_GET_SREGS, &segments);
	segments.cs.base = 0;
	segments.cs.selector = 0;
	segments.ds.base = DATA;
	segments.ds.selector = DATA >> 4;
	if (ioctl(guest.cpu, KVM_SET_SREGS, &segments) || ioctl(guest.cpu, KVM_SET_REGS, &registers))
		die("its registers");
	return guest;
}

/* Runs the guest until its next number. Returns true if the number is right. */
static int next(const struct guest *guest, unsigned long count)
{
	const struct kvm_run *run = guest->run;

	do {
		if (ioctl(guest->cpu, KVM_RUN, 0) && errno != EINTR)
			die("running it");
	} while (run->exit_reason == KVM_EXIT_INTR);
	return run->exit_reason == KVM_EXIT_IO &&
	       *((unsigned char *)run + run->io.data_offset) == (count & 255);
}

int main(void)
{
	struct pollfd console = { .fd = 0, .events = POLLIN };
	time_t end = time(NULL) + SECONDS;
	unsigned long count = 0, wrong = 0;
	struct guest guest;

	mkdir("/dev", 0755);
	mount("dev", "/dev", "devtmpfs", 0, NULL);
	load_kvm();
	guest = make();
	printf("begins\n");
	while (!wrong && time(NULL) < end && poll(&console, 1, 0) <= 0) {
		wrong += !next(&guest, ++count);
		if (count % OFTEN == 0) {
			printf("so far %lu\n", count);
			fflush(stdout);
		}
	}
	printf("counted %lu wrong %lu\n", count, wrong);
	fflush(stdout);
	tcdrain(1);
	return reboot(RB_POWER_OFF);
}
