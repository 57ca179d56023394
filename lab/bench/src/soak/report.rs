//! The page of a soak: docs/soak.md, and the same text on the terminal.

use super::{Outcome, Times, load};
use crate::exits;
use mercury_lab::markdown::{table, thousands};

/// Returns the page.
#[must_use]
pub fn page(outcome: &Outcome) -> String {
    let [native, attached] = outcome.hotplugs;
    let minutes = outcome.elapsed.as_secs() / 60;
    format!(
        "# {} times there and back\n\n\
        `{}` wrote this page. One machine was emulated in software ({}), \
        with Debian's own kernel {} and Mercury {}.\n\
        The work below ran all the time, for {minutes} minutes of wall time, \
        while all CPUs were attached and detached\n\
        {} times. In between CPUs were taken offline and brought back: {native} times while native, \
        and {attached}\n\
        times under the attached hypervisor, which then has to attach the CPU that comes.\n\n\
        ## What must hold\n\n{}\n\
        ## What ran meanwhile\n\n{}\n\
        PostgreSQL acknowledged {} transactions, and {} were found in its tables. {} failed.\n\n\
        ## Switch times\n\n\
        Times with interrupts off, per CPU, in the emulator's microseconds. The host is shared, \
        and a virtual CPU now\n\
        and then loses its host's CPU in the middle of a switch, which shows in the maximum.\n\
        [benchmarks.md](benchmarks.md) has the cost of a switch in instructions.\n\n{}\n\
        ## Exits\n\n{}\n\
        `hypercall` is the driver itself, which asks a CPU for its mode or detaches it. \
        The others are attach's own\n\
        checks, and on Intel CPUID, which always exits.\n",
        thousands(outcome.cycles),
        outcome.command,
        outcome.machine,
        outcome.kernel,
        outcome.version,
        thousands(outcome.cycles),
        checks(outcome),
        work(outcome),
        thousands(outcome.database.acknowledged),
        thousands(outcome.database.found),
        outcome.database.failed,
        times(outcome),
        exits(outcome),
    )
}

fn checks(outcome: &Outcome) -> String {
    let mark = |holds: bool| if holds { "yes" } else { "**NO**" };
    let rows = outcome.checks().into_iter().map(|(holds, what)| vec![what, mark(holds).to_owned()]);
    table(&["what", "holds"], &rows.collect::<Vec<_>>())
}

fn work(outcome: &Outcome) -> String {
    let row =
        |work: &load::Work| vec![work.name.to_owned(), thousands(work.passes), thousands(work.violations)];
    table(&["work", "done", "wrong"], &outcome.work.iter().map(row).collect::<Vec<_>>())
}

fn times(outcome: &Outcome) -> String {
    let rows = [times_of("attach", &outcome.attach), times_of("detach", &outcome.detach)];
    table(&["switch", "min", "median", "max"], &rows)
}

/// Returns one direction's row of the table.
pub(super) fn times_of(name: &str, times: &Times) -> Vec<String> {
    let us = |ns: u64| format!("{:.1}", ns as f64 / 1000.0);
    vec![name.to_owned(), us(times.min.unwrap_or(0)), us(times.median()), us(times.max)]
}

fn exits(outcome: &Outcome) -> String {
    let rows =
        exits::by_reason(&outcome.status).into_iter().map(|(reason, count)| vec![reason, thousands(count)]);
    table(&["reason", "all CPUs"], &rows.collect::<Vec<_>>())
}
