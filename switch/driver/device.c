// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/mercury: for root only, with one controller (a file open for writing) at a time.
 * switch/abi/src/ioctl.rs describes the requests. State belongs to the driver and not to the file: a
 * controller that is killed leaves the machine as its last complete request left it. Only a restore, the
 * fence and a snapshot that is not kept end with it.
 *
 * A process that maps the shared blocks has its own references to their pages. They outlive an unload and
 * show what was written last.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/capability.h>
#include <linux/cpu.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pid.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <asm/msr.h>
#include <asm/tsc.h>

#include "snapshot/snapshot.h"
#include "watch/watch.h"

#define MEASURE_COUNT_MAX	1000
/* A CPU mask longer than any kernel's is a mistake. */
#define MASK_WORDS_MAX		BITS_TO_LONGS(8192)

/* Only one is open for writing. */
static struct pid *controller;
static DEFINE_MUTEX(controller_lock);

union request {
	struct mercury_header header;
	struct mercury_system_info system;
	struct mercury_cpu_facts facts;
	struct mercury_load_request load;
	struct mercury_switch_request change;
	struct mercury_status_request status;
	struct mercury_measure_request measure;
	struct mercury_fault_request fault;
	struct mercury_snapshot_request snapshot;
	struct mercury_snapshot_read_request read;
	struct mercury_restart_request restart;
	struct mercury_load_frames_request load_frames;
	struct mercury_fence_request fence;
	struct mercury_log_request log;
	struct mercury_disk_log_request disk_log;
	struct mercury_firmware_request firmware;
	struct mercury_watch_request watch;
	struct mercury_postmortem_request postmortem;
	struct mercury_mend_request mend;
	struct mercury_integrity_request integrity;
};

/* An ioctl. `run` returns a MERCURY_CODE_* or a negative errno. */
struct operation {
	unsigned int cmd;
	bool read_only;
	/* Offset of the outcome in the request, or 0. */
	size_t outcome;
	/* The kernel's name for the like: where lockdown forbids that, it forbids this ioctl. */
	enum lockdown_reason like;
	int (*run)(union request *request, struct mercury_outcome *outcome);
};

/* Codes that have an errno of their own. */
static const int errnos[] = {
	[MERCURY_CODE_ABI_MISMATCH] = -EINVAL,
	[MERCURY_CODE_BAD_ARGUMENT] = -EINVAL,
	[MERCURY_CODE_UNKNOWN_OPERATION] = -EINVAL,
	[MERCURY_CODE_NOT_LOADED] = -ENODEV,
	[MERCURY_CODE_ALREADY_LOADED] = -EEXIST,
	[MERCURY_CODE_STILL_ATTACHED] = -EBUSY,
	[MERCURY_CODE_BUSY] = -EBUSY,
	[MERCURY_CODE_VIRTUALIZATION_IN_USE] = -EBUSY,
	[MERCURY_CODE_ORPHANED_HYPERVISOR] = -EBUSY,
	[MERCURY_CODE_LOCKED_DOWN] = -EPERM,
	[MERCURY_CODE_CPU_OFFLINE] = -ENXIO,
	[MERCURY_CODE_GOING_DOWN] = -ESHUTDOWN,
	[MERCURY_CODE_BAD_IMAGE] = -ENOEXEC,
	[MERCURY_CODE_CRASHED] = -ENOTRECOVERABLE,
	[MERCURY_CODE_NO_CONTIGUOUS_MEMORY] = -ENOMEM,
	[MERCURY_CODE_NO_MEMORY] = -ENOMEM,
};

static int code_to_errno(u32 code)
{
	if (code == MERCURY_CODE_OK || (code < ARRAY_SIZE(errnos) && errnos[code]))
		return errnos[code];
	return code < MERCURY_CODE_INVALID_GUEST_STATE ? -EOPNOTSUPP : -EIO;
}

static int run_system(union request *request, struct mercury_outcome *outcome)
{
	struct mercury_system_info *info = &request->system;

	mercury_monitor_check();
	info->state = mercury.state;
	info->possible_cpus = nr_cpu_ids;
	mutex_lock(&controller_lock);
	info->controller_pid = controller ? pid_vnr(controller) : 0;
	mutex_unlock(&controller_lock);
	info->wanted_cpus = cpumask_weight(&mercury.wanted);
	info->features = 0;
	if (IS_ENABLED(CONFIG_MERCURY_FAULT_INJECTION))
		info->features |= MERCURY_FEATURE_FAULT_INJECTION;
	if (mercury.monitor_port)
		info->features |= MERCURY_FEATURE_MONITOR;
	info->tsc_khz = tsc_khz;
	info->memory_fixed = mercury.memory_fixed;
	info->memory_per_cpu = mercury.memory_per_cpu;
	info->shared_size = 0;
	if (mercury.state != MERCURY_STATE_UNLOADED)
		info->shared_size = (u64)nr_cpu_ids * MERCURY_SHARED_CPU_SIZE;
	memcpy(info->version, mercury_image_header()->version, sizeof(info->version));
	mercury_snapshot_status(&info->snapshot);
	return MERCURY_CODE_OK;
}

/* The request of the CPU that mercury_on_cpus() runs on; under mercury.lock. */
static union request *scratch;

static u32 facts_on_cpu(struct mercury_cpu *m)
{
	mercury_read_facts(&scratch->facts, scratch->facts.cpu & MERCURY_FACTS_REGISTERS);
	return MERCURY_CODE_OK;
}

static u32 measure_on_cpu(struct mercury_cpu *m)
{
	struct mercury_measure_request *measure = &scratch->measure;
	u64 start, value;
	u32 i;

	if (mercury_mode() != MERCURY_MODE_ATTACHED)
		return MERCURY_CODE_WRONG_MODE;
	start = rdtsc_ordered();
	for (i = 0; i < measure->count; i++)
		mercury_hypercall(MERCURY_HYPERCALL_PING, 0, 0, &value);
	measure->ticks = rdtsc_ordered() - start;
	start = rdtsc_ordered();
	for (i = 0; i < measure->count; i++)
		barrier();
	measure->overhead_ticks = rdtsc_ordered() - start;
	return MERCURY_CODE_OK;
}

static u32 integrity_on_cpu(struct mercury_cpu *m)
{
	return mercury_hypercall(MERCURY_HYPERCALL_INTEGRITY, scratch->integrity.call,
				 scratch->integrity.argument, m->detail);
}

/* Runs something on one CPU that user space named; the CPU's code. */
static u32 on_named_cpu(u32 cpu, union request *request, u32 (*run)(struct mercury_cpu *m))
{
	u32 code = MERCURY_CODE_CPU_OFFLINE;

	cpus_read_lock();
	if (cpu < nr_cpu_ids && cpu_online(cpu)) {
		scratch = request;
		mercury_on_cpus(cpumask_of(cpu), run);
		code = mercury_cpu(cpu)->code;
	}
	cpus_read_unlock();
	return code;
}

static int run_facts(union request *request, struct mercury_outcome *outcome)
{
	mercury.iomem_end = mercury_iomem_end();
	return on_named_cpu(request->facts.cpu & ~MERCURY_FACTS_REGISTERS, request, facts_on_cpu);
}

static int run_measure(union request *request, struct mercury_outcome *outcome)
{
	if (!request->measure.count || request->measure.count > MEASURE_COUNT_MAX)
		return MERCURY_CODE_BAD_ARGUMENT;
	outcome->cpu = request->measure.cpu;
	return on_named_cpu(request->measure.cpu, request, measure_on_cpu);
}

/* Reads the mask of a switch request; `cpus` becomes NULL if it means all. */
static int read_mask(const struct mercury_switch_request *change, struct cpumask *storage,
		     const struct cpumask **cpus)
{
	const u64 __user *words = u64_to_user_ptr(change->mask_addr);
	u32 word, bit;
	u64 bits;

	*cpus = NULL;
	if (!change->mask_addr)
		return change->mask_words ? MERCURY_CODE_BAD_ARGUMENT : MERCURY_CODE_OK;
	if (!change->mask_words || change->mask_words > MASK_WORDS_MAX)
		return MERCURY_CODE_BAD_ARGUMENT;
	cpumask_clear(storage);
	for (word = 0; word < change->mask_words; word++) {
		if (get_user(bits, words + word))
			return -EFAULT;
		for (bit = 0; bit < 64; bit++) {
			if (!(bits & BIT_ULL(bit)))
				continue;
			if (word * 64 + bit >= nr_cpu_ids)
				return MERCURY_CODE_CPU_OFFLINE;
			cpumask_set_cpu(word * 64 + bit, storage);
		}
	}
	*cpus = storage;
	return cpumask_empty(storage) ? MERCURY_CODE_BAD_ARGUMENT : MERCURY_CODE_OK;
}

/* Reports the CPUs that this request has switched, as far as there is room. */
static int write_results(struct mercury_switch_request *change, u32 room, bool attached)
{
	struct mercury_switch_result __user *results = u64_to_user_ptr(change->results_addr);
	int cpu;

	for_each_possible_cpu(cpu) {
		struct mercury_cpu *m = mercury_cpu(cpu);
		struct mercury_switch_result result = {
			.cpu = cpu,
			.ticks = attached ? m->attach_ticks : m->detach_ticks,
		};

		if (!m->switched)
			continue;
		if (change->results_count < room &&
		    copy_to_user(results + change->results_count, &result, sizeof(result)))
			return -EFAULT;
		change->results_count++;
	}
	return 0;
}

static int run_switch(union request *request, struct mercury_outcome *outcome, bool attach)
{
	struct mercury_switch_request *change = &request->change;
	static struct cpumask storage;
	u32 room = change->results_addr ? change->results_count : 0;
	const struct cpumask *cpus;

	change->results_count = 0;
	if (change->flags & ~(attach ? MERCURY_SWITCH_CHECK_ONLY : MERCURY_SWITCH_FOR_NOW))
		return MERCURY_CODE_BAD_ARGUMENT;
	return read_mask(change, &storage, &cpus) ?:
	       (attach ? mercury_attach(cpus, change->flags & MERCURY_SWITCH_CHECK_ONLY, outcome) :
			 mercury_detach(cpus, change->flags, outcome)) ?:
	       write_results(change, room, attach);
}

static void fill_status(struct mercury_cpu_status *status, int cpu)
{
	struct mercury_cpu *m = mercury_cpu(cpu);

	status->cpu = cpu;
	status->mode = cpu_online(cpu) ? m->mode : MERCURY_MODE_OFFLINE;
	status->wanted = cpumask_test_cpu(cpu, &mercury.wanted);
	status->attach_ticks = m->attach_ticks;
	status->detach_ticks = m->detach_ticks;
	if (!m->shared)
		return;
	status->left_because = READ_ONCE(m->shared->left_because);
	status->attaches = READ_ONCE(m->shared->attaches);
	status->detaches = READ_ONCE(m->shared->detaches);
}

static int run_status(union request *request, struct mercury_outcome *outcome)
{
	struct mercury_cpu_status __user *cpus = u64_to_user_ptr(request->status.cpus_addr);
	u32 room = request->status.cpus_addr ? request->status.cpus_count : 0;
	int cpu, result = 0;

	mercury_monitor_check();
	request->status.state = mercury.state;
	request->status.cpus_count = 0;
	cpus_read_lock();
	mercury_on_cpus(cpu_online_mask, mercury_ask_mode);
	for_each_possible_cpu(cpu) {
		struct mercury_cpu_status status = {};

		if (request->status.cpus_count == room)
			break;
		fill_status(&status, cpu);
		if (copy_to_user(cpus + request->status.cpus_count, &status, sizeof(status))) {
			result = -EFAULT;
			break;
		}
		request->status.cpus_count++;
	}
	cpus_read_unlock();
	return result;
}

/*
 * Refuses a snapshot that lockdown forbids: user space reads one that is not kept, and is told so before
 * the machine stands still for it.
 */
static u32 check_lockdown(const union request *request)
{
	return !(request->snapshot.flags & MERCURY_SNAPSHOT_KEEP) &&
	       security_locked_down(LOCKDOWN_KCORE) ? MERCURY_CODE_LOCKED_DOWN : MERCURY_CODE_OK;
}

static int run_rollback(union request *request, struct mercury_outcome *outcome)
{
	if (request->snapshot.flags || request->snapshot.pool_pages)
		return MERCURY_CODE_BAD_ARGUMENT;
	return mercury_rollback(MERCURY_ROLLBACK_REASON_COMMAND, NULL);
}

static int run_watch(union request *request, struct mercury_outcome *outcome)
{
	int result = mercury_watch_set(&request->watch);

	mercury_watch_status(&request->watch);
	return result;
}

static int run_watch_status(union request *request, struct mercury_outcome *outcome)
{
	mercury_watch_status(&request->watch);
	return MERCURY_CODE_OK;
}

/* Operations that pass their request on. */
#define RUN(operation, call)							\
static int run_##operation(union request *request, struct mercury_outcome *outcome) \
{										\
	return call;								\
}

RUN(load, request->load.flags ? MERCURY_CODE_BAD_ARGUMENT : mercury_load(outcome))
RUN(unload, request->load.flags ? MERCURY_CODE_BAD_ARGUMENT : mercury_unload(outcome))
RUN(attach, run_switch(request, outcome, true))
RUN(detach, run_switch(request, outcome, false))
RUN(snapshot_prepare, check_lockdown(request) ?: mercury_snapshot_prepare(&request->snapshot))
RUN(snapshot_begin, check_lockdown(request) ?: mercury_snapshot_begin(&request->snapshot, outcome))
RUN(snapshot_read, mercury_snapshot_read(&request->read))
RUN(snapshot_end, mercury_snapshot_finish(&request->snapshot))
RUN(snapshot_machine, mercury_snapshot_machine(&request->restart, outcome))
RUN(postmortem, mercury_snapshot_postmortem(&request->postmortem))
RUN(fence, mercury_fence(&request->fence))
RUN(restore_begin, mercury_restore_begin(&request->restart, outcome))
RUN(restore_load, mercury_restore_load(&request->load_frames, outcome))
RUN(snapshot_read_present, mercury_snapshot_read_present(&request->read))
RUN(log_begin, mercury_snapshot_log_begin())
RUN(log_collect, mercury_snapshot_log_collect(&request->log))
RUN(disk_log, mercury_disk_log(&request->disk_log))
RUN(firmware, mercury_firmware_read(&request->firmware))
RUN(mend, mercury_mend(&request->mend))
RUN(integrity, on_named_cpu(request->integrity.cpu, request, integrity_on_cpu))
RUN(restore_read, mercury_restore_read(&request->load_frames, outcome))
RUN(restore_go, request->load.flags ? MERCURY_CODE_BAD_ARGUMENT : mercury_restore_go())

#ifdef CONFIG_MERCURY_FAULT_INJECTION
static int run_fault(union request *request, struct mercury_outcome *outcome)
{
	u32 code = mercury_fault_arm(&request->fault);

	request->fault.fired = mercury_fault_fired();
	return code;
}
#endif

/*
 * Lockdown keeps root out of the kernel's memory. Reading memory is like /proc/kcore, which lockdown for
 * confidentiality forbids. Replacing memory is like resuming from hibernation, which lockdown for integrity
 * forbids. A snapshot that is kept, and going back to it, shows nothing and takes nothing from outside.
 */
#define NONE	LOCKDOWN_NONE
#define READS	LOCKDOWN_KCORE
#define WRITES	LOCKDOWN_HIBERNATION
#define OUTCOME(type) offsetof(struct mercury_##type##_request, outcome)
static const struct operation operations[] = {
	{ MERCURY_IOC_SYSTEM, true, 0, NONE, run_system },
	{ MERCURY_IOC_FACTS, true, 0, NONE, run_facts },
	{ MERCURY_IOC_LOAD, false, OUTCOME(load), NONE, run_load },
	{ MERCURY_IOC_UNLOAD, false, OUTCOME(load), NONE, run_unload },
	{ MERCURY_IOC_ATTACH, false, OUTCOME(switch), NONE, run_attach },
	{ MERCURY_IOC_DETACH, false, OUTCOME(switch), NONE, run_detach },
	{ MERCURY_IOC_STATUS, true, 0, NONE, run_status },
	{ MERCURY_IOC_MEASURE, false, OUTCOME(measure), NONE, run_measure },
	{ MERCURY_IOC_SNAPSHOT_PREPARE, false, OUTCOME(snapshot), NONE, run_snapshot_prepare },
	{ MERCURY_IOC_SNAPSHOT_BEGIN, false, OUTCOME(snapshot), NONE, run_snapshot_begin },
	{ MERCURY_IOC_SNAPSHOT_READ, false, OUTCOME(snapshot_read), READS, run_snapshot_read },
	{ MERCURY_IOC_SNAPSHOT_END, false, OUTCOME(snapshot), NONE, run_snapshot_end },
	{ MERCURY_IOC_SNAPSHOT_MACHINE, false, OUTCOME(restart), READS, run_snapshot_machine },
	{ MERCURY_IOC_ROLLBACK, false, OUTCOME(snapshot), NONE, run_rollback },
	{ MERCURY_IOC_FENCE, false, OUTCOME(fence), NONE, run_fence },
	{ MERCURY_IOC_RESTORE_BEGIN, false, OUTCOME(restart), WRITES, run_restore_begin },
	{ MERCURY_IOC_RESTORE_LOAD, false, OUTCOME(load_frames), WRITES, run_restore_load },
	{ MERCURY_IOC_SNAPSHOT_READ_PRESENT, false, OUTCOME(snapshot_read), READS,
	  run_snapshot_read_present },
	{ MERCURY_IOC_LOG_BEGIN, false, OUTCOME(log), NONE, run_log_begin },
	{ MERCURY_IOC_LOG_COLLECT, false, OUTCOME(log), NONE, run_log_collect },
	{ MERCURY_IOC_DISK_LOG, false, OUTCOME(disk_log), NONE, run_disk_log },
	{ MERCURY_IOC_FIRMWARE, false, OUTCOME(firmware), READS, run_firmware },
	{ MERCURY_IOC_WATCH, false, OUTCOME(watch), NONE, run_watch },
	{ MERCURY_IOC_WATCH_STATUS, true, OUTCOME(watch), NONE, run_watch_status },
	{ MERCURY_IOC_POSTMORTEM, false, OUTCOME(postmortem), READS, run_postmortem },
	{ MERCURY_IOC_MEND, false, OUTCOME(mend), WRITES, run_mend },
	{ MERCURY_IOC_INTEGRITY, false, OUTCOME(integrity), NONE, run_integrity },
	{ MERCURY_IOC_RESTORE_READ, false, OUTCOME(load_frames), WRITES, run_restore_read },
	{ MERCURY_IOC_RESTORE_GO, false, OUTCOME(load), WRITES, run_restore_go },
#ifdef CONFIG_MERCURY_FAULT_INJECTION
	{ MERCURY_IOC_FAULT, false, 0, NONE, run_fault },
#endif
};

/* The operation with this number; the size in `cmd` may be another version's. */
static const struct operation *find_operation(unsigned int cmd)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(operations); i++)
		if (((operations[i].cmd ^ cmd) & ~(_IOC_SIZEMASK << _IOC_SIZESHIFT)) == 0)
			return &operations[i];
	return NULL;
}

static int perform(const struct operation *operation, union request *request,
		   struct mercury_outcome *outcome)
{
	if (operation->like != LOCKDOWN_NONE && security_locked_down(operation->like))
		return MERCURY_CODE_LOCKED_DOWN;
	return operation->run(request, outcome);
}

/* Runs an operation on a request that has been copied in; the outcome goes into the request. */
static int run(const struct operation *operation, union request *request)
{
	struct mercury_outcome outcome = { .cpu = MERCURY_NO_CPU };
	int result = MERCURY_CODE_ABI_MISMATCH;

	if (mutex_lock_interruptible(&mercury.lock))
		return -EINTR;
	if (mercury.leaving)
		result = MERCURY_CODE_GOING_DOWN;
	else if (request->header.size == _IOC_SIZE(operation->cmd) &&
		 request->header.version == MERCURY_ABI_VERSION)
		result = perform(operation, request, &outcome);
	mutex_unlock(&mercury.lock);
	if (result >= 0) {
		outcome.code = result;
		result = code_to_errno(result);
	}
	if (operation->outcome)
		memcpy((void *)request + operation->outcome, &outcome, sizeof(outcome));
	return result;
}

static long device_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	const struct operation *operation = find_operation(cmd);
	void __user *user = (void __user *)arg;
	union request *request;
	int result;

	if (!operation)
		return -ENOTTY;
	if (!operation->read_only && !(file->f_mode & FMODE_WRITE))
		return -EPERM;
	if (cmd != operation->cmd)
		return -EINVAL;
	request = kzalloc(sizeof(*request), GFP_KERNEL);
	if (!request)
		return -ENOMEM;
	if (copy_from_user(request, user, _IOC_SIZE(cmd))) {
		result = -EFAULT;
	} else {
		result = run(operation, request);
		if (result != -EINTR && copy_to_user(user, request, _IOC_SIZE(cmd)))
			result = -EFAULT;
	}
	kfree(request);
	return result;
}

static int device_mmap(struct file *file, struct vm_area_struct *vma)
{
	if (vma->vm_flags & VM_WRITE)
		return -EPERM;
#if KERNEL_VERSION(6, 3, 0) <= LINUX_VERSION_CODE
	vm_flags_mod(vma, VM_DONTEXPAND | VM_DONTDUMP, VM_MAYWRITE);
#else
	vma->vm_flags |= VM_DONTEXPAND | VM_DONTDUMP;
	vma->vm_flags &= ~VM_MAYWRITE;
#endif
	return mercury_shared_map(vma);
}

static int device_open(struct inode *inode, struct file *file)
{
	int result = 0;

	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	if (!(file->f_mode & FMODE_WRITE))
		return 0;
	mutex_lock(&controller_lock);
	if (controller)
		result = -EBUSY;
	else
		controller = get_pid(task_tgid(current));
	mutex_unlock(&controller_lock);
	return result;
}

static int device_release(struct inode *inode, struct file *file)
{
	if (!(file->f_mode & FMODE_WRITE))
		return 0;
	mutex_lock(&mercury.lock);
	mercury_snapshot_release();
	mercury_fence_release();
	mercury_restore_end();
	mercury_disk_log_release();
	mutex_unlock(&mercury.lock);
	mutex_lock(&controller_lock);
	put_pid(controller);
	controller = NULL;
	mutex_unlock(&controller_lock);
	return 0;
}

static const struct file_operations device_operations = {
	.owner = THIS_MODULE,
	.open = device_open,
	.release = device_release,
	.unlocked_ioctl = device_ioctl,
	.mmap = device_mmap,
	.llseek = noop_llseek,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "mercury",
	.mode = 0600,
	.fops = &device_operations,
};

int mercury_device_init(void)
{
	return misc_register(&device);
}

void mercury_device_exit(void)
{
	misc_deregister(&device);
}

/*
 * Waits until no process has the device open, if the module is removed by force: without the module the
 * kernel would jump into freed memory when such a process ends.
 */
void mercury_device_wait(void)
{
	if (module_refcount(THIS_MODULE) > 0)
		pr_warn("the driver stays until the last process has closed /dev/mercury\n");
	while (module_refcount(THIS_MODULE) > 0)
		msleep(50);
}
