// SPDX-License-Identifier: GPL-2.0-only
#include <linux/cpu.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>

#include "mercury_test.h"

#define LINE_MAX_LENGTH 128

static const struct {
	const char *name;
	unsigned int arguments;
	test_command run;
} commands[] = {
	{ "hold", 2, test_hold },
	{ "holding", 0, test_holding },
	{ "nmi", 2, test_nmi },
	{ "hypercall", 2, test_hypercall },
	{ "hidden-find", 0, test_hidden_find },
	{ "hidden-read", 0, test_hidden_read },
	{ "hidden-write", 1, test_hidden_write },
	{ "rdmsr", 2, test_rdmsr },
	{ "wrmsr", 3, test_wrmsr },
	{ "clear-cr4", 2, test_clear_cr4 },
	{ "vmxoff", 1, test_vmxoff },
	{ "state", 1, test_state },
	{ "refuse", 1, test_refuse },
	{ "restless", 1, test_restless },
	{ "wait", 1, test_wait },
	{ "send-read-only", 0, test_send_read_only },
	{ "queue-without-pages", 1, test_queue_without_pages },
	{ "sum", 1, test_sum },
	{ "flip", 2, test_flip },
	{ "hang", 1, test_hang },
	{ "hang-all", 1, test_hang_all },
	{ "soft-hang", 0, test_soft_hang },
	{ "hang-in-nmi", 1, test_hang_in_nmi },
	{ "oops", 1, test_oops },
	{ "hang-and-panic", 1, test_hang_and_panic },
	{ "triple-fault", 1, test_triple_fault },
	{ "flip-code", 1, test_flip_code },
	{ "flip-data", 2, test_flip_data },
	{ "flip-slab", 2, test_flip_slab },
	{ "flip-stack", 2, test_flip_stack },
	{ "flip-page-table", 1, test_flip_page_table },
	{ "flip-register", 1, test_flip_register },
	{ "stop", 1, test_stop },
	{ "hpet", 1, test_hpet },
};

void test_say(struct test_answer *answer, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	answer->used += vscnprintf(answer->text + answer->used,
				   sizeof(answer->text) - answer->used, format, arguments);
	va_end(arguments);
}

struct on_cpu {
	void (*run)(void *argument);
	void *argument;
};

static long with_interrupts_off(void *data)
{
	struct on_cpu *job = data;
	unsigned long flags;

	local_irq_save(flags);
	job->run(job->argument);
	local_irq_restore(flags);
	return 0;
}

int test_on_cpu(u64 cpu, void (*run)(void *), void *argument)
{
	struct on_cpu job = { run, argument };

	if (cpu >= nr_cpu_ids || !cpu_online(cpu))
		return -ENXIO;
	return work_on_cpu(cpu, with_interrupts_off, &job);
}

/* Splits a line into a command and its numbers, and runs it. */
static int run_line(char *line, struct test_answer *answer)
{
	u64 arguments[TEST_ARGUMENTS_MAX] = {};
	unsigned int count = 0, i;
	char *name, *word;

	line = strim(line);
	name = strsep(&line, " ");
	while ((word = strsep(&line, " ")) && count < TEST_ARGUMENTS_MAX)
		if (kstrtou64(word, 0, &arguments[count++]))
			return -EINVAL;
	for (i = 0; i < ARRAY_SIZE(commands); i++) {
		if (strcmp(commands[i].name, name))
			continue;
		return count == commands[i].arguments ? commands[i].run(answer, arguments) : -EINVAL;
	}
	return -ENOSYS;
}

static ssize_t test_write(struct file *file, const char __user *user, size_t size, loff_t *at)
{
	struct test_answer *answer = file->private_data;
	char line[LINE_MAX_LENGTH] = {};
	int err;

	if (size >= sizeof(line) || copy_from_user(line, user, size))
		return -EFAULT;
	answer->used = 0;
	*at = 0;
	err = run_line(line, answer);
	/* Each read begins at the start of the answer. */
	return err ? err : size;
}

static ssize_t test_read(struct file *file, char __user *user, size_t size, loff_t *at)
{
	struct test_answer *answer = file->private_data;

	return simple_read_from_buffer(user, size, at, answer->text, answer->used);
}

static int test_open(struct inode *inode, struct file *file)
{
	file->private_data = kzalloc(sizeof(struct test_answer), GFP_KERNEL);
	return file->private_data ? 0 : -ENOMEM;
}

static int test_release(struct inode *inode, struct file *file)
{
	kfree(file->private_data);
	return 0;
}

static const struct file_operations test_operations = {
	.owner = THIS_MODULE,
	.open = test_open,
	.release = test_release,
	.read = test_read,
	.write = test_write,
	.mmap = test_mmap,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "mercury_test",
	.mode = 0600,
	.fops = &test_operations,
};

static int __init test_init(void)
{
	int err = test_interrupts_init();

	if (err)
		return err;
	err = test_refuse_init();
	if (err)
		goto no_device;
	err = misc_register(&device);
	if (!err)
		return 0;
	test_refuse_exit();
no_device:
	test_interrupts_exit();
	return err;
}

/* The seconds for which the module's end keeps whoever removes it waiting. */
static uint slow_exit;
module_param(slow_exit, uint, 0600);

static void __exit test_exit(void)
{
	ssleep(slow_exit);
	misc_deregister(&device);
	test_flip_exit();
	test_refuse_exit();
	test_interrupts_exit();
}

module_init(test_init);
module_exit(test_exit);

MODULE_DESCRIPTION("Tests of Mercury that need to be in the kernel");
MODULE_AUTHOR("The Mercury authors");
MODULE_LICENSE("GPL");
