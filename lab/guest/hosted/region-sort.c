/*
 * Sorts numbers in a region that several hosted machines have (mercury hosted run --region): each machine sorts its part of
 * the numbers, and all write to the same memory. One machine fills the region, all sort, and any of them checks it:
 *
 *	region-sort pmem0 fill COUNT MACHINES
 *	region-sort pmem0 sort INDEX		in each machine, INDEX from 0 on
 *	region-sort pmem0 check
 *
 * It is a radix sort: four passes over eight bits each, from the lowest on. In each pass a machine counts the digits of its
 * part, waits for the others, and then moves its numbers to where the counts say. The machines wait for each other by
 * atomic numbers in the region, since a futex wakes nobody in another kernel.
 *
 * A program reaches a region by its physical address: /dev/mem. The kernel must not forbid that (CONFIG_IO_STRICT_DEVMEM).
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define DIGITS 256
#define PASSES 4
#define MOST_MACHINES 64
#define READY 0x74726F736E676572UL
/* The place of the numbers: after the head and the counts. */
#define NUMBERS (1 << 20)

struct head {
	_Atomic uint64_t ready;
	uint64_t count;
	uint64_t machines;
	/* The machines that have come to the end of a step, in all steps. */
	_Atomic uint64_t arrived;
	/* The numbers that each machine has moved in all passes. */
	_Atomic uint64_t moved[MOST_MACHINES];
	/* How often each digit is in each machine's part. */
	uint64_t digits[MOST_MACHINES][DIGITS];
};

static struct head *head;
static uint32_t *numbers[2];

static void die(const char *what)
{
	fprintf(stderr, "region-sort: %s: %s\n", what, strerror(errno));
	exit(1);
}

static unsigned long read_number(const char *form, const char *device)
{
	char path[128], *end, text[32] = "";
	unsigned long number;
	FILE *file;

	snprintf(path, sizeof(path), form, device);
	file = fopen(path, "r");
	if (!file || !fgets(text, sizeof(text), file))
		die(path);
	fclose(file);
	number = strtoul(text, &end, 0);
	if (end == text)
		die(path);
	return number;
}

/* Maps a region. Returns its size. */
static size_t map(const char *device)
{
	const unsigned long start = read_number("/sys/block/%s/device/resource", device);
	const size_t size = read_number("/sys/block/%s/size", device) * 512;
	const int memory = open("/dev/mem", O_RDWR);
	void *at;

	if (memory < 0)
		die("/dev/mem");
	at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, start);
	if (at == MAP_FAILED)
		die("mmap");
	head = at;
	return size;
}

static void find_numbers(void)
{
	numbers[0] = (uint32_t *)((char *)head + NUMBERS);
	numbers[1] = numbers[0] + head->count;
}

/* A generator of random numbers (splitmix64), so that others can compute the same. */
static uint64_t random_at(uint64_t index)
{
	uint64_t z = (index + 1) * 0x9E3779B97F4A7C15UL;

	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9UL;
	z = (z ^ z >> 27) * 0x94D049BB133111EBUL;
	return z ^ z >> 31;
}

static void fill(size_t size, uint64_t count, uint64_t machines)
{
	if (machines == 0 || machines > MOST_MACHINES || sizeof(*head) > NUMBERS || NUMBERS + 2 * count * sizeof(uint32_t) > size) {
		errno = EINVAL;
		die("the region has no room");
	}
	memset(head, 0, sizeof(*head));
	head->count = count;
	head->machines = machines;
	find_numbers();
	for (uint64_t i = 0; i < count; i++)
		numbers[0][i] = random_at(i);
	atomic_store(&head->ready, READY);
	printf("filled %lu\n", count);
}

/* Waits until all machines have come to the end of a step. */
static void meet(uint64_t step)
{
	const uint64_t all = (step + 1) * head->machines;
	const struct timespec moment = { .tv_nsec = 200000 };

	atomic_fetch_add(&head->arrived, 1);
	while (atomic_load(&head->arrived) < all)
		nanosleep(&moment, NULL);
}

static void pass(uint64_t index, int number, uint64_t *step)
{
	const uint64_t first = head->count * index / head->machines, end = head->count * (index + 1) / head->machines;
	const uint32_t *from = numbers[number % 2];
	uint32_t *to = numbers[1 - number % 2];
	uint64_t places[DIGITS], *mine = head->digits[index], place = 0;
	const int shift = 8 * number;

	memset(mine, 0, sizeof(head->digits[index]));
	for (uint64_t i = first; i < end; i++)
		mine[from[i] >> shift & 0xFF]++;
	meet((*step)++);
	for (int digit = 0; digit < DIGITS; digit++) {
		for (uint64_t machine = 0; machine < head->machines; machine++) {
			if (machine == index)
				places[digit] = place;
			place += head->digits[machine][digit];
		}
	}
	for (uint64_t i = first; i < end; i++)
		to[places[from[i] >> shift & 0xFF]++] = from[i];
	atomic_fetch_add(&head->moved[index], end - first);
	meet((*step)++);
}

static void sort(uint64_t index)
{
	const struct timespec moment = { .tv_nsec = 1000000 };
	uint64_t step = 0;

	while (atomic_load(&head->ready) != READY)
		nanosleep(&moment, NULL);
	if (index >= head->machines) {
		errno = EINVAL;
		die("there are fewer machines");
	}
	find_numbers();
	for (int number = 0; number < PASSES; number++)
		pass(index, number, &step);
	printf("sorted as %lu of %lu\n", index, head->machines);
}

/* Says if the numbers are in order, and two sums: of the numbers in any order, and in their order. */
static void check(void)
{
	uint64_t wrong = 0, sum = 0, ordered = 0xCBF29CE484222325UL;

	if (atomic_load(&head->ready) != READY) {
		errno = EINVAL;
		die("the region has no numbers");
	}
	find_numbers();
	for (uint64_t i = 0; i < head->count; i++) {
		wrong += i && numbers[0][i - 1] > numbers[0][i];
		sum += numbers[0][i];
		ordered = (ordered ^ numbers[0][i]) * 0x100000001B3UL;
	}
	printf("checked %lu numbers, %lu out of order, sum %lx, in order %lx, moved by", head->count, wrong, sum, ordered);
	for (uint64_t machine = 0; machine < head->machines; machine++)
		printf(" %lu", atomic_load(&head->moved[machine]));
	printf("\n");
}

int main(int count, char **words)
{
	size_t size;

	if (count < 3)
		return 2;
	size = map(words[1]);
	if (count == 5 && !strcmp(words[2], "fill"))
		fill(size, strtoul(words[3], NULL, 0), strtoul(words[4], NULL, 0));
	else if (count == 4 && !strcmp(words[2], "sort"))
		sort(strtoul(words[3], NULL, 0));
	else if (count == 3 && !strcmp(words[2], "check"))
		check();
	else
		return 2;
	return 0;
}
