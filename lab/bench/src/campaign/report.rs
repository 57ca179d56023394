//! The tables of a campaign, on the terminal and in docs/campaign.md.

use std::collections::BTreeMap;

use super::{
    fault::Class,
    record::{Outcome, Record, SETTLE_MS},
};
use crate::stats;
use mercury_lab::markdown::{table, thousands};

/// The heading of the section that the command writes.
pub(super) const HEADING: &str = "## Results";

/// The columns of outcomes, each with its heading.
const OUTCOMES: [(&str, &[Outcome]); 8] = [
    ("no effect", &[Outcome::NoEffect]),
    ("complaint", &[Outcome::Complaint]),
    ("wrong sums, unnoticed", &[Outcome::Unnoticed]),
    ("died, and back right", &[Outcome::Right]),
    ("back wrong", &[Outcome::Wrong]),
    ("died, not put back", &[Outcome::Missed]),
    ("lost", &[Outcome::Lost]),
    ("hung for good", &[Outcome::Hung]),
];

/// Returns the tables for the terminal.
pub(super) fn text(all: &[Record]) -> String {
    [by_class(all), losses(all)].join("\n")
}

/// Returns the section of the page, from all campaigns.
pub(super) fn section(all: &[Record]) -> String {
    let (faults, controls): (Vec<Record>, Vec<Record>) =
        all.iter().cloned().partition(|record| record.class != Class::Control);
    let is_counted = |record: &Record| record.outcome != Outcome::Refused;
    let injected = of(&faults, is_counted).len();
    let died = count(&faults, Outcome::has_died);
    let right = count(&faults, |outcome| outcome == Outcome::Right);
    let controls = of(&controls, is_counted);
    format!(
        "{HEADING}\n\n\
        `lab campaign --page` wrote this section. {} faults were injected. The machine died of {}, and \
        went back with right\nsums {} times ({}). {}\n\n{}\n\
        The same by machine and load:\n\n{}\n\
        Deaths with right sums afterwards, by cause: {}.\n\n\
        From the death to the second life, in the emulator's time: {}\n\n{}",
        thousands(injected as u64),
        thousands(died as u64),
        thousands(right as u64),
        share(right, died),
        notes(
            all.len() - injected - controls.len(),
            controls.len(),
            controls.iter().filter(|record| record.outcome.has_died()).count()
        ),
        by_class(all),
        by_campaign(&faults),
        causes(&faults),
        times(&faults),
        losses(all)
    )
}

/// Says what the other counts leave out: faults that were not injected, and runs without a fault.
fn notes(refused: usize, controls: usize, died: usize) -> String {
    let refused = format!("{refused} more could not be injected.");
    match controls {
        0 => format!(
            "{refused} No run was made without a fault, so false\nalarms among the deaths are not known."
        ),
        _ => format!("{refused} Of {controls} runs without a\nfault, {died} ended in a death: false alarms."),
    }
}

/// Counts the causes for which machines went back.
fn causes(all: &[Record]) -> String {
    let mut counts = BTreeMap::new();
    for record in of(all, |record| record.outcome == Outcome::Right) {
        *counts.entry(record.reason.as_deref().unwrap_or("none")).or_insert(0) += 1;
    }
    let each: Vec<String> = counts.into_iter().map(|(cause, count)| format!("{count} by {cause}")).collect();
    if each.is_empty() { "none".to_owned() } else { each.join(", ") }
}

fn of(all: &[Record], test: impl Fn(&Record) -> bool) -> Vec<&Record> {
    all.iter().filter(|record| test(record)).collect()
}

fn count(all: &[Record], test: impl Fn(Outcome) -> bool) -> usize {
    of(all, |record| test(record.outcome)).len()
}

fn share(part: usize, whole: usize) -> String {
    if whole == 0 { "–".to_owned() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

fn by_class(all: &[Record]) -> String {
    let mut classes: Vec<Class> = all.iter().map(|record| record.class).collect();
    classes.sort_unstable();
    classes.dedup();
    let faults = of(all, |record| record.class != Class::Control).into_iter().cloned().collect();
    let mut groups: Vec<(String, Vec<Record>)> = classes
        .into_iter()
        .map(|class| (class.name().to_owned(), of(all, |record| record.class == class)))
        .map(|(name, records)| (name, records.into_iter().cloned().collect()))
        .collect();
    groups.push(("all".to_owned(), faults));
    outcomes("class", &groups)
}

fn by_campaign(all: &[Record]) -> String {
    let name = |record: &Record| {
        let (load, moment) = (record.load.name(), record.moment.name());
        format!("{}, {} CPUs, {load}, {moment}", record.kernel, record.cpus)
    };
    let mut groups: Vec<(String, Vec<Record>)> = Vec::new();
    for record in all {
        match groups.iter_mut().find(|(known, _)| *known == name(record)) {
            Some((_, records)) => records.push(record.clone()),
            None => groups.push((name(record), vec![record.clone()])),
        }
    }
    outcomes("machine, load, moment", &groups)
}

/// Returns a table with a row of outcomes for each group.
fn outcomes(first: &str, groups: &[(String, Vec<Record>)]) -> String {
    let row = |(name, all): &(String, Vec<Record>)| {
        let of_each = OUTCOMES.map(|(_, wanted)| count(all, |outcome| wanted.contains(&outcome)));
        let injected: usize = of_each.iter().sum();
        let died = count(all, Outcome::has_died);
        let right = count(all, |outcome| outcome == Outcome::Right);
        let mut row = vec![name.clone(), injected.to_string()];
        row.extend(of_each.map(|number| number.to_string()));
        row.push(share(right, died));
        row
    };
    let mut header = vec![first, "faults"];
    header.extend(OUTCOMES.map(|(name, _)| name));
    header.push("of deaths");
    table(&header, &groups.iter().map(row).collect::<Vec<_>>())
}

/// Describes the times of the rollbacks after a death.
fn times(all: &[Record]) -> String {
    let died = of(all, |record| record.outcome == Outcome::Right);
    let ms = |record: &&Record| Some((record.meet_us? + record.work_us?) / 1e3);
    let whole: Vec<f64> = died.iter().filter_map(ms).collect();
    let each: Vec<f64> = died.iter().filter_map(|record| record.ms_per_1000_pages()).collect();
    if whole.is_empty() {
        return "no machine has died.".to_owned();
    }
    let most = whole.iter().copied().fold(0.0, f64::max);
    format!(
        "{:.0} ms in the median, {most:.0} ms at most; {:.1} ms for 1,000 pages in the median, without the \
         {SETTLE_MS} ms in which devices come to rest.",
        stats::median(&whole),
        stats::median(&each)
    )
}

/// Lists the machines that were not what they were before, and the wrong sums that nothing noticed.
fn losses(all: &[Record]) -> String {
    let lost = of(all, |record| record.outcome.is_manifest() && record.outcome != Outcome::Right);
    if lost.is_empty() {
        return "Nothing was lost.\n".to_owned();
    }
    let lines = lost.iter().map(|record| {
        format!("- {}, {} CPUs, {}: {}\n", record.kernel, record.cpus, record.load.name(), record.describe())
    });
    format!("Losses, and wrong sums that nothing noticed:\n\n{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::campaign::record::tests::record;

    fn all() -> Vec<Record> {
        vec![
            record(Class::Lkdtm, 0, Outcome::Right),
            record(Class::Lkdtm, 1, Outcome::Complaint),
            record(Class::Code, 0, Outcome::Right),
            record(Class::Code, 1, Outcome::NoEffect),
            record(Class::Code, 2, Outcome::Unnoticed),
            record(Class::Code, 3, Outcome::Lost),
            record(Class::Code, 4, Outcome::Refused),
            record(Class::Control, 0, Outcome::NoEffect),
            record(Class::Control, 1, Outcome::Right),
        ]
    }

    #[test]
    fn rows_add_up_and_refusals_do_not_count() {
        let table = by_class(&all());
        let cells = |name: &str| -> Vec<String> {
            let row = table.lines().find(|line| line.starts_with(&format!("| {name} "))).unwrap_or_default();
            row.split('|').map(|cell| cell.trim().to_owned()).filter(|cell| !cell.is_empty()).collect()
        };
        assert_eq!(cells("LKDTM"), ["LKDTM", "2", "0", "1", "0", "1", "0", "0", "0", "0", "100.0 %"]);
        assert_eq!(cells("code"), ["code", "4", "1", "0", "1", "1", "0", "0", "1", "0", "50.0 %"]);
        assert_eq!(cells("all"), ["all", "6", "1", "1", "1", "2", "0", "0", "1", "0", "66.7 %"]);
        assert_eq!(cells("no fault"), ["no fault", "2", "1", "0", "0", "1", "0", "0", "0", "0", "100.0 %"]);
    }

    #[test]
    fn losses_are_listed_with_what_nothing_noticed() {
        let text = losses(&all());
        assert_eq!(text.lines().filter(|line| line.starts_with("- ")).count(), 2, "{text}");
        assert!(text.contains("code 3: ") && text.contains("lost"), "{text}");
        assert_eq!(losses(&all()[..2]), "Nothing was lost.\n");
    }

    #[test]
    fn the_section_counts_what_was_injected() {
        let section = section(&all());
        assert!(section.starts_with("## Results\n\n") && section.contains("6 faults were injected"));
        assert!(section.contains("bookworm-cloud, 2 CPUs, idle, just before"), "{section}");
        assert!(section.contains("1 more could not be injected"), "{section}");
        assert!(section.contains("Of 2 runs without a\nfault, 1 ended in a death"), "{section}");
        assert!(section.contains("by cause: 2 by panic."), "{section}");
        assert!(super::section(&all()[..2]).contains("No run was made without a fault"));
    }
}
