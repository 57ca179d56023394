// SPDX-License-Identifier: GPL-2.0-only
/*
 * Heartbeats, samples, and the alarm.
 *
 * NMIs come from the HPET, to all CPUs, and from each CPU's own counter of cycles if the processor has one.
 * The kernel itself says when a CPU stands still for good reason: it calls arch_touch_nmi_watchdog() while
 * it stops all CPUs and while it writes to a slow console. A probe there hears that.
 *
 * A hang puts the machine back to its snapshot. Without a snapshot it becomes a panic, so that a crash
 * kernel runs. The hung CPU itself panics, and the log shows where it hung.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/hrtimer.h>
#include <linux/kdebug.h>
#include <linux/kgdb.h>
#include <linux/kprobes.h>
#include <linux/perf_event.h>
#include <linux/sched/isolation.h>
#include <linux/suspend.h>
#include <asm/irq_regs.h>
#include <asm/nmi.h>
#include <asm/tsc.h>

#include "../snapshot/snapshot.h"
#include "watch.h"

/* A CPU that hangs for so long is dead. One may stand still for longer while the kernel says why. */
#define PATIENCE_MS	1100
#define LONG_PATIENCE_MS 20000
/* The time for which a word of the kernel's holds. */
#define TOUCH_HOLDS_MS	1000
/* The time after an alarm that is only reported. */
#define QUIET_MS	10000
/* The time for the devices of a life that begins with a rollback. */
#define RETURN_MS	60000

/**
 * struct watched - a CPU
 * @timer: its heartbeat
 * @event: its counter of cycles, or NULL
 * @beats: the number of heartbeats
 * @beat_tick: the number of the HPET's last NMI at the last heartbeat
 * @answered: the number of the HPET's last NMI that this CPU has handled
 * @pulse: the conclusions so far
 * @sampled_ms: the time of the last sample
 * @owed: the last NMI has answered several of the HPET's, of which one may still come
 * @touched: the kernel has said that this CPU is well
 * @on: the CPU is watched
 */
struct watched {
	struct hrtimer timer;
	struct perf_event *event;
	u64 beats;
	u32 beat_tick;
	u32 answered;
	struct mercury_pulse pulse;
	u64 sampled_ms;
	bool owed;
	bool touched;
	bool on;
};

static DEFINE_PER_CPU(struct watched, watched);

/* The state that user space is told of. */
static struct mercury_watch_request state;

static struct {
	bool paused, deaf;
	int hotplug, alarm;
	u64 touched_ms, reported_ms, returned_ms;
} watch;

static u64 now_ms(void)
{
	return div_u64(rdtsc(), tsc_khz);
}

/* Returns true while CPUs may stand still. */
static bool is_excused(u64 now)
{
#ifdef CONFIG_KGDB
	if (atomic_read(&kgdb_active) != -1)
		return true;
#endif
	return READ_ONCE(mercury.at_instant) || READ_ONCE(mercury.going_down) || READ_ONCE(watch.paused) ||
	       mercury_is_near(now, READ_ONCE(watch.reported_ms), QUIET_MS);
}

/* The only place that decides for the whole machine; the first CPU that comes here does it. */
static void alarm(struct pt_regs *regs, int cpu, const char *what)
{
	if (cmpxchg(&watch.alarm, 0, 1))
		return;
	mercury_hpet_silence();
	state.alarms++;
	snprintf((char *)state.message, sizeof(state.message), "CPU %d %s (seen at %pS)", cpu, what,
		 (void *)regs->ip);
	mercury_rollback(MERCURY_ROLLBACK_REASON_HANG, (char *)state.message);
	if (state.acts & MERCURY_WATCH_PANIC)
		nmi_panic(regs, (char *)state.message);
	pr_emerg("%s\n", (char *)state.message);
	WRITE_ONCE(watch.reported_ms, now_ms());
	if (state.tiers & MERCURY_WATCH_TIER_HPET)
		mercury_hpet_resume();
	WRITE_ONCE(watch.alarm, 0);
}

/* Samples this CPU, in an NMI. */
static void sample_here(struct pt_regs *regs)
{
	struct watched *w = this_cpu_ptr(&watched);
	struct mercury_sample sample = {
		.now_ms = now_ms(),
		.beats = w->beats,
		.irqs_off = !(regs->flags & X86_EFLAGS_IF),
	};
	bool touched, slow;
	u64 frozen;

	/* After a pause of the whole machine the NMIs of both sources come at once, and are one sample. */
	if (sample.now_ms - w->sampled_ms < MERCURY_WATCH_PERIOD_MS / 2)
		return;
	w->sampled_ms = sample.now_ms;
	touched = xchg(&w->touched, false);
	sample.excused = !w->on || touched || is_excused(sample.now_ms);
	frozen = mercury_pulse_add(&w->pulse, &sample);
	if (frozen > READ_ONCE(state.longest_ms))
		WRITE_ONCE(state.longest_ms, frozen);
	slow = watch.deaf ||
	       mercury_is_near(sample.now_ms, READ_ONCE(watch.touched_ms), TOUCH_HOLDS_MS);
	if (mercury_pulse_is_dead(&w->pulse, frozen, slow ? LONG_PATIENCE_MS : PATIENCE_MS))
		alarm(regs, smp_processor_id(), "hangs with interrupts off");
}

/* Looks for CPUs that answer no NMI. */
static void find_silent(struct pt_regs *regs, u32 tick)
{
	int cpu;

	for_each_online_cpu(cpu) {
		const struct watched *w = per_cpu_ptr(&watched, cpu);

		if (READ_ONCE(w->on) && !is_excused(now_ms()) &&
		    mercury_is_silent(tick, READ_ONCE(w->answered), READ_ONCE(w->beat_tick)))
			alarm(regs, cpu, "answers no NMI");
	}
}

static int nmi_comes(unsigned int type, struct pt_regs *regs)
{
	struct watched *w = this_cpu_ptr(&watched);
	bool first;
	u32 tick = mercury_hpet_tick(&first);

	if (tick == w->answered)
		return xchg(&w->owed, false) ? NMI_HANDLED : NMI_DONE;
	w->owed = tick - w->answered > 1;
	WRITE_ONCE(w->answered, tick);
	sample_here(regs);
	if (first)
		find_silent(regs, tick);
	return NMI_HANDLED;
}

static void cycles_pass(struct perf_event *event, struct perf_sample_data *data, struct pt_regs *regs)
{
	sample_here(regs);
}

static enum hrtimer_restart beat(struct hrtimer *timer)
{
	struct watched *w = this_cpu_ptr(&watched);

	WRITE_ONCE(w->beats, w->beats + 1);
	WRITE_ONCE(w->beat_tick, mercury_hpet_ticks());
	if (watch.returned_ms && !mercury_is_near(now_ms(), watch.returned_ms, RETURN_MS) &&
	    xchg(&watch.returned_ms, 0))
		alarm(get_irq_regs(), smp_processor_id(), "waits in vain for this life's devices");
	if (READ_ONCE(state.tiers) & MERCURY_WATCH_TIER_HPET && !mercury_hpet_mend()) {
		state.tiers &= ~MERCURY_WATCH_TIER_HPET;
		state.hpet_code = MERCURY_CODE_WATCH_SILENT;
		pr_warn("NMIs of the HPET come no more: %s\n",
			state.tiers ? "the watch goes on without them" : "no hang is noticed any more");
	}
	hrtimer_forward_now(timer, ms_to_ktime(MERCURY_WATCH_PERIOD_MS));
	return HRTIMER_RESTART;
}

/* The counter of cycles overflows about as often as the HPET's timer fires, while the CPU is busy. */
static void count_cycles(struct watched *w, unsigned int cpu)
{
	struct perf_event_attr attributes = {
		.type = PERF_TYPE_HARDWARE,
		.config = PERF_COUNT_HW_CPU_CYCLES,
		.size = sizeof(attributes),
		.pinned = 1,
		.sample_period = (u64)tsc_khz * MERCURY_WATCH_PERIOD_MS,
	};

	w->event = perf_event_create_kernel_counter(&attributes, cpu, NULL, cycles_pass, NULL);
	/* A pinned counter that finds no room in the PMU is made all the same, and never counts. */
	if (!IS_ERR(w->event) && READ_ONCE(w->event->state) != PERF_EVENT_STATE_ERROR)
		return;
	if (!IS_ERR(w->event))
		perf_event_release_kernel(w->event);
	w->event = NULL;
	state.perf_code = MERCURY_CODE_WATCH_NO_PMU;
}

/* CPUs that the kernel's own watchdog leaves undisturbed are left alone here too. */
static int cpu_comes(unsigned int cpu)
{
	struct watched *w = this_cpu_ptr(&watched);

	if (!housekeeping_test_cpu(cpu, HK_TYPE_TIMER))
		return 0;
	*w = (struct watched){ .beat_tick = mercury_hpet_ticks(), .answered = mercury_hpet_ticks() };
	w->pulse.since_ms = now_ms();
	hrtimer_init(&w->timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_PINNED_HARD);
	w->timer.function = beat;
	hrtimer_start(&w->timer, ms_to_ktime(MERCURY_WATCH_PERIOD_MS), HRTIMER_MODE_REL_PINNED_HARD);
	count_cycles(w, cpu);
	WRITE_ONCE(w->on, true);
	state.cpus++;
	return 0;
}

static int cpu_goes(unsigned int cpu)
{
	struct watched *w = this_cpu_ptr(&watched);

	if (!w->on)
		return 0;
	WRITE_ONCE(w->on, false);
	state.cpus--;
	hrtimer_cancel(&w->timer);
	if (w->event)
		perf_event_release_kernel(w->event);
	w->event = NULL;
	return 0;
}

static int kernel_says_why(struct kprobe *probe, struct pt_regs *regs)
{
	raw_cpu_write(watched.touched, true);
	WRITE_ONCE(watch.touched_ms, now_ms());
	return 0;
}

static struct kprobe touch_probe = {
	.symbol_name = "arch_touch_nmi_watchdog",
	.pre_handler = kernel_says_why,
};

/* A task of the kernel's, an interrupt, or a task that holds a spinlock takes the kernel with it. */
static bool is_fatal(const struct pt_regs *regs)
{
	return current->flags & PF_KTHREAD || preempt_count() || !(regs->flags & X86_EFLAGS_IF);
}

static int die_comes(struct notifier_block *block, unsigned long action, void *data)
{
	const struct die_args *args = data;
	char message[64];

	if (action != DIE_OOPS || !(state.acts & (MERCURY_WATCH_OOPS | MERCURY_WATCH_OOPS_FATAL)))
		return NOTIFY_DONE;
	if (!(state.acts & MERCURY_WATCH_OOPS) && !is_fatal(args->regs))
		return NOTIFY_DONE;
	snprintf(message, sizeof(message), "%s at %pS", args->str, (void *)args->regs->ip);
	/* What the rules call fatal is. The kernel would go on, and the next snapshot would be of it. */
	if (mercury_rollback(MERCURY_ROLLBACK_REASON_OOPS, message) != MERCURY_CODE_NO_SNAPSHOT)
		panic("%s, and no way back", message);
	return NOTIFY_DONE;
}

static struct notifier_block die_notifier = {
	.notifier_call = die_comes,
	.priority = INT_MAX,
};

static int power_changes(struct notifier_block *block, unsigned long action, void *data)
{
	bool sleeps = action == PM_SUSPEND_PREPARE || action == PM_HIBERNATION_PREPARE ||
		      action == PM_RESTORE_PREPARE;

	WRITE_ONCE(watch.paused, sleeps);
	WRITE_ONCE(watch.returned_ms, 0);
	if (sleeps)
		mercury_hpet_silence();
	else if (state.tiers & MERCURY_WATCH_TIER_HPET)
		mercury_hpet_resume();
	return NOTIFY_DONE;
}

static struct notifier_block power_notifier = {
	.notifier_call = power_changes,
};

/*
 * This machine was put back, and its devices are about to resume. At its instant the watch was paused. A
 * device that does not come back would leave the machine standing: its tasks are frozen.
 */
void mercury_watch_return(void)
{
	WRITE_ONCE(watch.returned_ms, state.acts ? now_ms() : 0);
	WRITE_ONCE(watch.paused, false);
	if (state.tiers & MERCURY_WATCH_TIER_HPET)
		mercury_hpet_resume();
}

bool mercury_watch_is_on(void)
{
	return state.acts;
}

/* Ends the watch, if there is one. */
void mercury_watch_stop(void)
{
	if (!state.acts)
		return;
	unregister_pm_notifier(&power_notifier);
	/* An alarm that is under way, or a heartbeat, would set the timer again. */
	WRITE_ONCE(state.tiers, 0);
	synchronize_rcu();
	mercury_hpet_stop();
	cpuhp_remove_state(watch.hotplug);
	unregister_die_notifier(&die_notifier);
	unregister_nmi_handler(NMI_LOCAL, "mercury-watch");
	if (!watch.deaf)
		unregister_kprobe(&touch_probe);
	state.acts = 0;
}

static u32 start(u32 acts)
{
	/* What an earlier registration has left there would be refused. */
	touch_probe.addr = NULL;
	touch_probe.flags = 0;
	watch.deaf = register_kprobe(&touch_probe) != 0;
	if (watch.deaf)
		pr_notice("the kernel cannot tell why CPUs stand still: hangs count after %d s\n",
			  LONG_PATIENCE_MS / 1000);
	if (register_nmi_handler(NMI_LOCAL, nmi_comes, 0, "mercury-watch"))
		goto no_handler;
	state.perf_code = MERCURY_CODE_OK;
	watch.paused = false;
	watch.reported_ms = now_ms() - QUIET_MS;
	/* Before there are other NMIs, which would be taken for the timer's. */
	state.hpet_code = mercury_hpet_start();
	watch.hotplug = cpuhp_setup_state(CPUHP_AP_ONLINE_DYN, "mercury:watch", cpu_comes, cpu_goes);
	if (watch.hotplug < 0)
		goto no_hotplug;
	register_die_notifier(&die_notifier);
	register_pm_notifier(&power_notifier);
	state.tiers = state.hpet_code ? 0 : MERCURY_WATCH_TIER_HPET;
	state.tiers |= state.perf_code ? 0 : MERCURY_WATCH_TIER_PERF;
	state.acts = acts;
	return MERCURY_CODE_OK;

no_hotplug:
	if (!state.hpet_code)
		mercury_hpet_stop();
	unregister_nmi_handler(NMI_LOCAL, "mercury-watch");
no_handler:
	if (!watch.deaf)
		unregister_kprobe(&touch_probe);
	return MERCURY_CODE_NO_MEMORY;
}

/* Starts the watch with these acts, or stops it. A watch that no NMI serves is refused. */
int mercury_watch_set(const struct mercury_watch_request *request)
{
	u32 code, acts = request->acts;

	if (request->flags || request->reserved || acts & ~MERCURY_WATCH_ACTS ||
	    (acts && !(acts & MERCURY_WATCH_ON)))
		return MERCURY_CODE_BAD_ARGUMENT;
	if (state.acts && acts && state.tiers) {
		state.acts = acts;
		return MERCURY_CODE_OK;
	}
	mercury_watch_stop();
	code = acts ? start(acts) : MERCURY_CODE_OK;
	if (code == MERCURY_CODE_OK && acts && !state.tiers) {
		code = state.hpet_code;
		mercury_watch_stop();
	}
	return code;
}

void mercury_watch_status(struct mercury_watch_request *request)
{
	const struct mercury_header header = request->header;

	state.ticks = mercury_hpet_ticks();
	*request = state;
	request->header = header;
}
