// SPDX-License-Identifier: GPL-2.0-only
/*
 * The last comparator of the HPET, which Linux leaves alone, sends an NMI to all CPUs: by a message of its
 * own (FSB), or by a free pin of the I/O APIC. It fires once. The first CPU that sees it sets it again.
 *
 * A CPU cannot ask where an NMI came from. The counter has passed the comparator's value if it was this one.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/acpi.h>
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/irq.h>
#include <linux/stop_machine.h>
#include <asm/apicdef.h>
#include <asm/hpet.h>

#include "../mercury.h"
#include "watch.h"

/* The pins of the I/O APIC that a timer can use: the upper half of its configuration. */
#define HPET_Tn_PINS(n)		(HPET_Tn_CFG(n) + 4)
/* Physical destination "all CPUs", and delivery as NMI: in a message, and in an entry of the I/O APIC. */
#define MESSAGE_ADDRESS		0xfeeff000
#define DELIVER_NMI		0x400
#define ENTRY_ALL_CPUS		0xff000000
#define ENTRY_MASKED		0x10000
#define ENTRY(pin)		(0x10 + 2 * (pin))
#define PINS			24
/* Silent ticks in a row after which the tier is given up. */
#define MENDS_MAX		10

union state {
	struct {
		u32 due;	/* the comparator's value */
		u32 tick;	/* NMIs so far */
	};
	u64 all;
};

static struct {
	void __iomem *registers, *ioapic;
	union state state;
	u32 timer, period, config;
	u32 pin;
	u32 mends, seen;
	unsigned long seen_at;	/* in jiffies: NMIs came, or the timer was set */
	bool on;
} hpet;

static u32 read_entry(u32 index)
{
	writel(index, hpet.ioapic);
	return readl(hpet.ioapic + 0x10);
}

static void write_entry(u32 index, u32 value)
{
	writel(index, hpet.ioapic);
	writel(value, hpet.ioapic + 0x10);
}

/*
 * Takes the highest pin of `routes` that the kernel has no use for, or gives the pin back. With all CPUs
 * stopped: the kernel's own accesses take two steps.
 */
static int change_pin(void *routes)
{
	u32 selected = readl(hpet.ioapic);
	int pin = PINS - 1;

	if (!routes && (read_entry(ENTRY(hpet.pin)) & ~APIC_SEND_PENDING) == DELIVER_NMI)
		write_entry(ENTRY(hpet.pin), ENTRY_MASKED);
	while (routes && pin > 0 && !(*(u32 *)routes & BIT(pin) && read_entry(ENTRY(pin)) == ENTRY_MASKED))
		pin--;
	hpet.pin = routes ? pin : 0;
	if (hpet.pin) {
		write_entry(ENTRY(pin) + 1, ENTRY_ALL_CPUS);
		write_entry(ENTRY(pin), DELIVER_NMI);
	}
	writel(selected, hpet.ioapic);
	return 0;
}

/* Returns the address of the HPET, or 0. */
static phys_addr_t find_hpet(void)
{
	struct acpi_table_header *table;
	phys_addr_t address = 0;

	if (ACPI_FAILURE(acpi_get_table(ACPI_SIG_HPET, 0, &table)))
		return 0;
	if (((struct acpi_table_hpet *)table)->address.space_id == ACPI_ADR_SPACE_SYSTEM_MEMORY)
		address = ((struct acpi_table_hpet *)table)->address.address;
	acpi_put_table(table);
	return address;
}

/* Behind an IOMMU that remaps interrupts neither way reaches a CPU. The name of ACPI's interrupt says so. */
static bool is_remapped(void)
{
	struct irq_data *data = irq_get_irq_data(acpi_gbl_FADT.sci_interrupt);

	return data && data->chip && data->chip->name && strstarts(data->chip->name, "IR-");
}

static u32 find_timer(void)
{
	phys_addr_t address = find_hpet();
	u32 id, config, period;

	/* Page 0 can be mapped, and its words may look like an HPET's. */
	hpet.registers = address ? ioremap(address, HPET_MMAP_SIZE) : NULL;
	if (!hpet.registers)
		return MERCURY_CODE_WATCH_NO_HPET;
	id = readl(hpet.registers + HPET_ID);
	period = readl(hpet.registers + HPET_PERIOD);
	hpet.timer = (id & HPET_ID_NUMBER) >> HPET_ID_NUMBER_SHIFT;
	/* The first two are for the kernel's clock and the RTC. A counter that stands still is nobody's. */
	if (id == U32_MAX || !period || hpet.timer < 2 ||
	    !(readl(hpet.registers + HPET_CFG) & HPET_CFG_ENABLE))
		return MERCURY_CODE_WATCH_NO_HPET;
	config = readl(hpet.registers + HPET_Tn_CFG(hpet.timer));
	if (config & HPET_TN_ENABLE)
		return MERCURY_CODE_WATCH_HPET_BUSY;
	/* The period of the counter is in femtoseconds. */
	hpet.period = div_u64(MERCURY_WATCH_PERIOD_MS * 1000000000000ull, period);
	hpet.config = HPET_TN_ENABLE | HPET_TN_32BIT | (config & HPET_TN_FSB_CAP ? HPET_TN_FSB : 0);
	return is_remapped() ? MERCURY_CODE_WATCH_REMAPPED : MERCURY_CODE_OK;
}

/* The way of the NMI from the timer to the CPUs. */
static u32 find_way(void)
{
	u32 routes = readl(hpet.registers + HPET_Tn_PINS(hpet.timer));

	if (hpet.config & HPET_TN_FSB)
		return MERCURY_CODE_OK;
	hpet.ioapic = ioremap(IO_APIC_DEFAULT_PHYS_BASE, PAGE_SIZE);
	if (!hpet.ioapic)
		return MERCURY_CODE_WATCH_NO_PIN;
	stop_machine(change_pin, &routes, NULL);
	hpet.config |= hpet.pin << HPET_TN_ROUTE_SHIFT;
	return hpet.pin ? MERCURY_CODE_OK : MERCURY_CODE_WATCH_NO_PIN;
}

/*
 * Sets the comparator. A CPU that is held up meanwhile (by an SMI, or by its host) sets a value that the
 * counter has passed already, which would not come for minutes.
 */
static void set_comparator(u32 due)
{
	writel(due, hpet.registers + HPET_Tn_CMP(hpet.timer));
	while ((s32)(readl(hpet.registers + HPET_COUNTER) - due) >= 0) {
		due = readl(hpet.registers + HPET_COUNTER) + hpet.period;
		WRITE_ONCE(hpet.state.due, due);
		writel(due, hpet.registers + HPET_Tn_CMP(hpet.timer));
	}
}

/* Lets the timer fire. Another CPU may silence it meanwhile. */
static void enable(void)
{
	writel(hpet.config, hpet.registers + HPET_Tn_CFG(hpet.timer));
	if (!READ_ONCE(hpet.on))
		writel(0, hpet.registers + HPET_Tn_CFG(hpet.timer));
}

/* Suspend, a rollback or another machine may have left every register in another state. */
static void arm(void)
{
	u32 due = readl(hpet.registers + HPET_COUNTER) + hpet.period;

	if (hpet.config & HPET_TN_FSB) {
		writel(DELIVER_NMI, hpet.registers + HPET_Tn_ROUTE(hpet.timer));
		writel(MESSAGE_ADDRESS, hpet.registers + HPET_Tn_ROUTE(hpet.timer) + 4);
	}
	hpet.seen_at = jiffies;
	/* First the comparator: an old value may fire at once. */
	WRITE_ONCE(hpet.state.due, due);
	set_comparator(due);
	enable();
}

/* Sets the timer again after mercury_hpet_silence(). */
void mercury_hpet_resume(void)
{
	hpet.mends = 0;
	WRITE_ONCE(hpet.on, true);
	arm();
}

/* Starts the NMIs. A timer whose NMIs do not come is no watch. */
u32 mercury_hpet_start(void)
{
	u32 code = find_timer() ?: find_way(), before = mercury_hpet_ticks();

	if (code == MERCURY_CODE_OK) {
		mercury_hpet_resume();
		msleep(4 * MERCURY_WATCH_PERIOD_MS);
		if (mercury_hpet_ticks() - before < 2)
			code = MERCURY_CODE_WATCH_SILENT;
	}
	if (code != MERCURY_CODE_OK)
		mercury_hpet_stop();
	return code;
}

void mercury_hpet_stop(void)
{
	mercury_hpet_silence();
	/* A CPU may still be in the handler of NMIs, or in that of its heartbeat. */
	synchronize_rcu();
	if (hpet.pin)
		stop_machine(change_pin, NULL, NULL);
	iounmap(hpet.ioapic);
	iounmap(hpet.registers);
	hpet.ioapic = NULL;
	hpet.registers = NULL;
}

/* Returns true if the timer was on. */
bool mercury_hpet_silence(void)
{
	bool was_on = xchg(&hpet.on, false);

	if (hpet.registers)
		writel(0, hpet.registers + HPET_Tn_CFG(hpet.timer));
	return was_on;
}

u32 mercury_hpet_ticks(void)
{
	return READ_ONCE(hpet.state.tick);
}

/*
 * Waits for the next NMI, so that none comes for almost a period. A CPU that starts has no table of
 * interrupts at first, and an NMI there would reset the machine.
 */
void mercury_hpet_wait(void)
{
	u32 before = mercury_hpet_ticks(), i;

	for (i = 0; i < 20 && READ_ONCE(hpet.on) && mercury_hpet_ticks() == before; i++)
		msleep(20);
}

/*
 * Returns the number of the last NMI. @first: this CPU is the first to see it, and has set the timer for the
 * next one.
 */
u32 mercury_hpet_tick(bool *first)
{
	union state old, new;

	*first = false;
	if (!READ_ONCE(hpet.on))
		return mercury_hpet_ticks();
	old.all = READ_ONCE(hpet.state.all);
	if (!mercury_timer_has_fired(readl(hpet.registers + HPET_COUNTER), old.due, hpet.period))
		return old.tick;
	new.due = readl(hpet.registers + HPET_COUNTER) + hpet.period;
	new.tick = old.tick + 1;
	*first = cmpxchg64(&hpet.state.all, old.all, new.all) == old.all;
	if (*first) {
		set_comparator(new.due);
		enable();
		WRITE_ONCE(hpet.mends, 0);
	}
	return mercury_hpet_ticks();
}

/*
 * Sets the timer again if its NMI has not come: suspend, a rollback or another machine has left it in
 * another state. Returns false if that does not help, and the tier is over.
 */
bool mercury_hpet_mend(void)
{
	u32 tick = mercury_hpet_ticks();
	s32 late;

	if (!READ_ONCE(hpet.on))
		return true;
	if (tick != hpet.seen)
		hpet.seen_at = jiffies;
	hpet.seen = tick;
	late = readl(hpet.registers + HPET_COUNTER) - READ_ONCE(hpet.state.due);
	/* A counter that stands still is never late. */
	if (late < (s32)(2 * hpet.period) && late > -(s32)(2 * hpet.period) &&
	    time_before(jiffies, hpet.seen_at + msecs_to_jiffies(4 * MERCURY_WATCH_PERIOD_MS)))
		return true;
	if (READ_ONCE(hpet.mends) > MENDS_MAX) {
		mercury_hpet_silence();
		return false;
	}
	WRITE_ONCE(hpet.mends, READ_ONCE(hpet.mends) + 1);
	arm();
	return true;
}
