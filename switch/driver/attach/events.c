// SPDX-License-Identifier: GPL-2.0-only
/*
 * Events that the kernel tells of: CPUs that come and go, suspend, reboot, panic, and modules of KVM and
 * other hypervisors, which use the same hardware. Every handler may be called twice or in vain.
 *
 * A panic is announced by the kernel's emergency callback. There is one slot for it, which KVM's modules
 * want too. The driver holds the slot while the hypervisor is loaded and KVM is not. Without the callback,
 * Linux 6.1 still clears EFER.SVME in an emergency, and that write is a detach. Beside KVM, a probe on the
 * kernel's way to a crash kernel detaches the CPU that crashes.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/kobject.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/panic_notifier.h>
#include <linux/reboot.h>
#include <linux/sched/signal.h>
#include <linux/string.h>
#include <linux/syscore_ops.h>
#include <asm/reboot.h>

#include "attach.h"

/* Later kernels, stable ones among them, hand an argument to syscore operations (see Kbuild). */
#ifdef MERCURY_STRUCT_SYSCORE
#define SYSCORE_ARGUMENT	void *data
#else
#define SYSCORE_ARGUMENT	void
#endif

const struct mercury_hooks *mercury_hooks __ro_after_init;

void __init mercury_hooks_register(const struct mercury_hooks *hooks)
{
	mercury_hooks = hooks;
}

static int hotplug_state, dead_state;

/* Attaches this CPU if it should be; interrupts off, no other CPU does anything of the kind. */
static u32 attach_here(void)
{
	struct mercury_cpu *m = this_cpu_ptr(&mercury_cpus);

	if (mercury_fault(MERCURY_FAULT_POINT_HOTPLUG))
		return MERCURY_CODE_INJECTED_FAULT;
	/* The monitor has yet to see it. */
	if (READ_ONCE(m->shared->crash.code) != MERCURY_CODE_OK)
		return MERCURY_CODE_CRASHED;
	return mercury_check_cpu(m) ?: mercury_vendor->attach_cpu(m);
}

static void detach_here(void)
{
	unsigned long flags;

	local_irq_save(flags);
	mercury_vendor->detach_cpu(this_cpu_ptr(&mercury_cpus));
	local_irq_restore(flags);
}

static bool is_wanted(unsigned int cpu)
{
	return mercury.state == MERCURY_STATE_ATTACHED && !mercury.going_down &&
	       (mercury.want_all || cpumask_test_cpu(cpu, &mercury.wanted));
}

/* A CPU that refuses stays native; that is no reason to keep it offline. */
static void attach_if_wanted(unsigned int cpu)
{
	unsigned long flags;
	u32 code;

	if (!is_wanted(cpu))
		return;
	local_irq_save(flags);
	code = attach_here();
	local_irq_restore(flags);
	if (code == MERCURY_CODE_OK) {
		cpumask_set_cpu(cpu, &mercury.wanted);
		return;
	}
	cpumask_clear_cpu(cpu, &mercury.wanted);
	pr_warn("CPU %u came online and stays native (`mercury explain %s`)\n", cpu,
		mercury_code_name(code));
}

static int cpu_comes(unsigned int cpu)
{
	mercury_hooks->cpu_online();
	attach_if_wanted(cpu);
	return 0;
}

/* Runs on the CPU that goes. */
static int cpu_goes(unsigned int cpu)
{
	if (mercury.state != MERCURY_STATE_UNLOADED)
		detach_here();
	return 0;
}

/* Runs on another CPU, before this one starts. */
static int cpu_will_come(unsigned int cpu)
{
	mercury_hooks->cpu_starts();
	return 0;
}

/* Runs on another CPU: this one can be asked no more, but it has published that it left. */
static int cpu_is_dead(unsigned int cpu)
{
	const struct mercury_shared_cpu *shared = mercury_cpu(cpu)->shared;

	if (mercury.state != MERCURY_STATE_UNLOADED && READ_ONCE(shared->attached))
		pr_err("CPU %u is offline and attached\n", cpu);
	return 0;
}

/*
 * The boot CPU goes through suspend, hibernation and kexec without a hotplug callback. The instant of a
 * snapshot is nothing of that kind.
 */
static int system_suspends(SYSCORE_ARGUMENT)
{
	if (mercury.state != MERCURY_STATE_UNLOADED && !mercury.at_instant)
		detach_here();
	return 0;
}

static void system_resumes(SYSCORE_ARGUMENT)
{
	if (!mercury.at_instant)
		attach_if_wanted(smp_processor_id());
}

static void system_shuts_down(SYSCORE_ARGUMENT)
{
	mercury.going_down = true;
	if (mercury.state != MERCURY_STATE_UNLOADED)
		detach_here();
}

static struct syscore_ops syscore_ops = {
	.suspend = system_suspends,
	.resume = system_resumes,
	.shutdown = system_shuts_down,
};

#ifdef MERCURY_STRUCT_SYSCORE
static struct syscore syscore = { .ops = &syscore_ops };
#else
#define register_syscore(syscore)	register_syscore_ops(&syscore_ops)
#define unregister_syscore(syscore)	unregister_syscore_ops(&syscore_ops)
#endif

/* The time for which a reboot waits for a request that is being carried out. */
#define REBOOT_WAITS	(30 * HZ)

static int reboot_comes(struct notifier_block *block, unsigned long action, void *data)
{
	unsigned long end = jiffies + REBOOT_WAITS;
	struct mercury_outcome outcome = {};

	mercury.going_down = true;
	mercury_hooks->crash();
	/*
	 * The task that reboots may hold the lock that keeps the system from sleeping, and a snapshot waits
	 * for that lock while it holds ours. A request may wait for a page of its caller that never comes.
	 * The detach is left out then: CPUs leave one by one as the kernel stops them.
	 */
	while (!mutex_trylock(&mercury.lock)) {
		if (READ_ONCE(mercury.waits_for_sleep) || time_after(jiffies, end))
			return NOTIFY_DONE;
		schedule_timeout_uninterruptible(1);
	}
	mercury_detach(NULL, false, &outcome);
	mutex_unlock(&mercury.lock);
	return NOTIFY_DONE;
}

static struct notifier_block reboot_notifier = {
	.notifier_call = reboot_comes,
};

/*
 * A machine that can be put back to a snapshot is. Otherwise no CPU is attached any more; those that are do
 * no harm where they stop.
 */
static int panic_comes(struct notifier_block *block, unsigned long action, void *data)
{
	mercury_hooks->crash();
	mercury_hooks->go_back(MERCURY_ROLLBACK_REASON_PANIC, data);
	mercury.going_down = true;
	return NOTIFY_DONE;
}

static struct notifier_block panic_notifier = {
	.notifier_call = panic_comes,
	.priority = INT_MAX,
};

/* On each CPU, perhaps in an NMI, before a crash kernel or a forced reset takes over. */
static noinstr void emergency(void)
{
	struct mercury_cpu *m = per_cpu_ptr(&mercury_cpus, raw_smp_processor_id());

	if (mercury_hooks->stays_attached())
		return;
	WRITE_ONCE(mercury.going_down, true);
	if (mercury_mode() == MERCURY_MODE_ATTACHED)
		mercury_vendor->detach_cpu(m);
}

/*
 * The kernel goes down, and another one takes over. From here on a CPU that clears EFER.SVME leaves the
 * hypervisor. The emergency callback may belong to KVM, or may be missing.
 */
static int crash_comes(struct kprobe *probe, struct pt_regs *regs)
{
	unsigned long flags;

	mercury_kvm_allow_now(false);
	mercury_hooks->crash();
	local_irq_save(flags);
	emergency();
	local_irq_restore(flags);
	return 0;
}

static struct kprobe crash_probe = {
	.symbol_name = "machine_crash_shutdown",
	.pre_handler = crash_comes,
};

static bool crash_is_told;

/* The holder of the emergency slot, and the presence of KVM, which wants it. */
static DEFINE_MUTEX(slot_lock);
static bool slot_wanted, slot_held, kvm_present;

/* Modules of other hypervisors, and which of them are there. switch/control/src/module.rs names them too. */
static const char * const rivals[] = { "vboxdrv", "vmmon", "jailhouse" };
static unsigned long rivals_present;

/*
 * KVM runs above the hypervisor where that can be, where its end can be told from the kernel's, and
 * where SVM is certainly KVM's. Beside another hypervisor's module both find the hardware taken.
 * The emergency slot is KVM's if KVM is there.
 */
static void decide(void)
{
	bool hold = IS_ENABLED(CONFIG_MERCURY_EMERGENCY_SLOT) && slot_wanted && !kvm_present;

	lockdep_assert_held(&slot_lock);
	mercury_kvm_allow(kvm_present && !rivals_present && crash_is_told && mercury_vendor &&
			  mercury_vendor->shares);
#ifdef CONFIG_MERCURY_EMERGENCY_SLOT
	if (hold && !slot_held)
		cpu_emergency_register_virt_callback(emergency);
	if (!hold && slot_held)
		cpu_emergency_unregister_virt_callback(emergency);
#endif
	slot_held = hold;
}

static void learn(bool *fact, bool value)
{
	mutex_lock(&slot_lock);
	*fact = value;
	decide();
	mutex_unlock(&slot_lock);
}

/* Takes the kernel's emergency callback, if KVM does not want it, or gives it back. */
void mercury_emergency_want(bool wanted)
{
	learn(&slot_wanted, wanted);
}

/* Returns true if the driver is told of an emergency, provided that the kernel tells any module. */
bool mercury_emergency_is_ours(void)
{
	return !IS_ENABLED(CONFIG_MERCURY_EMERGENCY_SLOT) || READ_ONCE(slot_held);
}

static void set_rival(int rival, bool there)
{
	mutex_lock(&slot_lock);
	__assign_bit(rival, &rivals_present, there);
	decide();
	mutex_unlock(&slot_lock);
}

/*
 * A third one comes where SVM is KVM's and the hypervisor's: they are left to themselves. A request may have
 * the lock and be about to freeze this task: the module's load fails then.
 */
static int rival_comes(int rival)
{
	struct mercury_outcome outcome = {};

	while (!mutex_trylock(&mercury.lock)) {
		if (READ_ONCE(mercury.waits_for_sleep) || signal_pending(current)) {
			pr_notice("%s cannot be loaded while a snapshot is taken: load it again\n",
				  rivals[rival]);
			return -EBUSY;
		}
		schedule_timeout_interruptible(1);
	}
	if (mercury.kvm_may && mercury.state == MERCURY_STATE_ATTACHED) {
		pr_notice("%s comes, which is not shared with as KVM is: all CPUs are detached\n",
			  rivals[rival]);
		mercury_detach(NULL, false, &outcome);
	}
	set_rival(rival, true);
	mutex_unlock(&mercury.lock);
	return 0;
}

static int module_changes(struct notifier_block *block, unsigned long action, void *data)
{
	const struct module *module = data;
	int rival = match_string(rivals, ARRAY_SIZE(rivals), module->name);
	bool comes = action == MODULE_STATE_COMING;
	int err = 0;

	if (!comes && action != MODULE_STATE_GOING)
		return NOTIFY_DONE;
	if (strcmp(module->name, "kvm") == 0)
		learn(&kvm_present, comes);
	if (rival >= 0 && !comes)
		set_rival(rival, false);
	if (rival >= 0 && comes)
		err = rival_comes(rival);
	if (comes)
		mercury_hooks->module_comes(module->name);
	if (mercury_vendor && strcmp(module->name, mercury_vendor->kvm) == 0 && comes &&
	    !READ_ONCE(mercury.kvm_may) && READ_ONCE(mercury.state) == MERCURY_STATE_ATTACHED)
		pr_notice("%s will find %s in use: run `mercury detach` before using KVM\n",
			  mercury_vendor->kvm, mercury_vendor->what);
	return notifier_from_errno(err);
}

static struct notifier_block module_notifier = {
	.notifier_call = module_changes,
};

/* KVM may have been there before us. */
static void find_kvm(void)
{
	if (__symbol_get("kvm_init")) {
		__symbol_put("kvm_init");
		kvm_present = true;
	}
}

/* So may others: each module has a directory beside our own. One that goes is no longer counted. */
static void find_rivals(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(rivals); i++) {
		struct kobject *found = kset_find_obj(THIS_MODULE->mkobj.kobj.kset, rivals[i]);
		const struct module *module;

		if (!found)
			continue;
		module = container_of(found, struct module_kobject, kobj)->mod;
		__assign_bit(i, &rivals_present, module && module->state != MODULE_STATE_GOING);
		kobject_put(found);
	}
}

/* With the notifier registered: a module that comes or goes meanwhile waits for the lock. */
static void find_others(void)
{
	mutex_lock(&slot_lock);
	find_kvm();
	find_rivals();
	decide();
	mutex_unlock(&slot_lock);
}

static void forget_modules(void)
{
	if (crash_is_told)
		unregister_kprobe(&crash_probe);
	unregister_module_notifier(&module_notifier);
}

int mercury_events_init(void)
{
	int err = register_module_notifier(&module_notifier);

	if (err)
		return err;
	crash_is_told = !register_kprobe(&crash_probe);
	find_others();
	hotplug_state = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN, "mercury:online",
						  cpu_comes, cpu_goes);
	if (hotplug_state < 0) {
		forget_modules();
		return hotplug_state;
	}
	dead_state = cpuhp_setup_state_nocalls(CPUHP_BP_PREPARE_DYN, "mercury:dead",
					       cpu_will_come, cpu_is_dead);
	if (dead_state < 0) {
		cpuhp_remove_state_nocalls(hotplug_state);
		forget_modules();
		return dead_state;
	}
	register_syscore(&syscore);
	register_reboot_notifier(&reboot_notifier);
	atomic_notifier_chain_register(&panic_notifier_list, &panic_notifier);
	return 0;
}

void mercury_events_exit(void)
{
	mercury_monitor_stop();
	atomic_notifier_chain_unregister(&panic_notifier_list, &panic_notifier);
	unregister_reboot_notifier(&reboot_notifier);
	unregister_syscore(&syscore);
	cpuhp_remove_state_nocalls(dead_state);
	cpuhp_remove_state_nocalls(hotplug_state);
	forget_modules();
}
