//! `make campaign`: a machine is hurt again and again, and each time has to go back to its snapshot, with
//! right sums.
//!
//! * [`fault`] has the classes of faults. A fault is known by its seed, class and number, and can be
//!   repeated.
//! * [`subject`] is the machine, with the script of one injection.
//! * [`record`] classifies what came of it, and keeps it in a file, from which a campaign is resumed.
//! * [`report`] makes the table, and the section of docs/campaign.md.

pub mod fault;
pub mod record;
mod report;
mod subject;

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use fault::{Class, Fault};
use mercury_lab::{
    error::{Context, Error, Result},
    kernel::Kernel,
    live::{self, Line},
    lkdtm, paths,
    spec::Platform,
};
use record::{Outcome, Record, Results};
use subject::Subject;

/// The work of the machine, besides the computation whose sums are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// None.
    Idle,
    /// PostgreSQL with pgbench, on a cluster in RAM.
    Postgres,
    /// Reads of a disk, past the page cache and through it, and traffic through a network card.
    DiskAndNetwork,
}

impl Load {
    /// Returns the load's name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Postgres => "PostgreSQL",
            Self::DiskAndNetwork => "disk and network",
        }
    }
}

/// The time of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moment {
    /// A snapshot is kept just before it.
    JustBefore,
    /// A snapshot is kept every 30 seconds, and the fault strikes at random in between.
    AtRandom,
}

impl Moment {
    /// Returns the moment's name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::JustBefore => "just before",
            Self::AtRandom => "at random",
        }
    }
}

/// The amount of work.
#[derive(Clone, Debug)]
pub struct Plan {
    pub kernel: Kernel,
    pub cpus: u32,
    pub load: Load,
    pub moment: Moment,
    pub classes: Vec<Class>,
    /// Faults in all, those of earlier runs of the same campaign included.
    pub count: usize,
    pub seed: u64,
    /// The time after which no more faults are injected.
    pub time: Option<Duration>,
}

impl Plan {
    /// Returns the campaign's name, which the file of its results has.
    pub(crate) fn name(&self) -> String {
        let Self { kernel, cpus, seed, .. } = self;
        let text = format!("{kernel}-{cpus}cpus-{}-{}-seed{seed}", self.load.name(), self.moment.name());
        text.to_lowercase().replace(' ', "-")
    }

    /// Returns true if each crash type has had its turn, in a campaign of these alone.
    fn ends_before(&self, number: u64, lkdtm_types: usize) -> bool {
        self.classes == [Class::Lkdtm] && number >= lkdtm_types as u64
    }

    /// Returns the class and the number of each fault that is still to come, the classes by turns.
    fn remaining<'a>(&'a self, done: &'a BTreeSet<(Class, u64)>) -> impl Iterator<Item = (Class, u64)> + 'a {
        let all = (0..).flat_map(|number| self.classes.iter().map(move |class| (*class, number)));
        all.filter(|key| !done.contains(key)).take(self.count.saturating_sub(done.len()))
    }
}

/// `lab campaign`: injects faults, keeps the results, and prints the table.
///
/// # Errors
/// If the machine cannot be booted, or a machine that died was lost or came back with wrong sums.
pub fn command(plan: &Plan) -> Result<()> {
    let results = run(plan, Results::open(&plan.name())?)?;
    println!("\n{}", report::text(results.all()));
    println!("The results are in {}", results.path().display());
    check(results.all())
}

/// `lab campaign --page`: writes the section of docs/campaign.md from all results that were kept.
///
/// # Errors
/// If there are no results, or the page cannot be written.
pub fn write_page() -> Result<()> {
    let all = record::read_all()?;
    let path = paths::root().join("docs/campaign.md");
    let page = fs::read_to_string(&path).context(|| format!("read {}", path.display()))?;
    let section = report::section(&all);
    println!("{section}");
    let page = mercury_lab::markdown::replace_section(&page, report::HEADING, &section);
    fs::write(&path, page).context(|| format!("write {}", path.display()))?;
    println!("written: {}", path.display());
    Ok(())
}

/// Checks that each machine that died has come back with right sums.
///
/// # Errors
/// With the faults for which that is not so.
pub fn check(all: &[Record]) -> Result<()> {
    let lost: Vec<String> =
        all.iter().filter(|record| record.outcome.is_loss()).map(Record::describe).collect();
    if lost.is_empty() { Ok(()) } else { Err(Error::Unhealthy(lost.join("\n"))) }
}

/// Injects the faults that the results lack. A machine that was lost makes place for a fresh one.
///
/// # Errors
/// If a machine cannot be booted, or a result not be kept.
pub fn run(plan: &Plan, mut results: Results) -> Result<Results> {
    if Platform::chosen()? != Platform::Qemu {
        return Err(Error::Unsupported { reason: "this processor has no rollback in this version" });
    }
    let done = results.done(&plan.classes);
    live::say(&format!("{}: {} faults are done", plan.name(), done.len()));
    let lkdtm = plan.classes.contains(&Class::Lkdtm).then(|| lkdtm::build(plan.kernel)).transpose()?;
    let (begun, mut line) = (Instant::now(), Line::begin());
    let mut subject = None;
    for (class, number) in plan.remaining(&done) {
        if plan.time.is_some_and(|time| begun.elapsed() >= time) {
            break;
        }
        let machine = match subject.take() {
            Some(machine) => machine,
            None => Subject::boot(plan, lkdtm.as_deref())?,
        };
        if plan.ends_before(number, machine.lkdtm_types().len()) {
            break;
        }
        let fault = Fault::new(plan.seed, class, number, machine.lkdtm_types());
        let seen = machine.inject(&fault, plan.moment);
        let record = Record::new(plan, &fault, &seen);
        println!("    {}", record.describe());
        let keeps = record.outcome.keeps_machine(plan.moment);
        if record.outcome.is_loss() || record.outcome == Outcome::Refused {
            results.keep_log(&record, &machine.last_words())?;
        }
        results.add(record)?;
        line.show(&tally(results.all()));
        subject = keeps.then_some(machine);
    }
    Ok(results)
}

fn tally(all: &[Record]) -> String {
    let died = all.iter().filter(|record| record.outcome.has_died()).count();
    let right = all.iter().filter(|record| record.outcome == Outcome::Right).count();
    format!("{} faults, {died} deaths, {right} of them back with right sums", all.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            kernel: Kernel::BookwormCloud,
            cpus: 2,
            load: Load::DiskAndNetwork,
            moment: Moment::JustBefore,
            classes: vec![Class::Code, Class::Stack],
            count: 5,
            seed: 7,
            time: None,
        }
    }

    #[test]
    fn a_campaign_goes_on_where_it_ended() {
        let plan = plan();
        assert_eq!(plan.name(), "bookworm-cloud-2cpus-disk-and-network-just-before-seed7");
        let all: Vec<_> = plan.remaining(&BTreeSet::new()).collect();
        assert_eq!(all[..3], [(Class::Code, 0), (Class::Stack, 0), (Class::Code, 1)]);
        assert_eq!(all.len(), 5);
        let done: BTreeSet<_> = all[..3].iter().copied().collect();
        assert_eq!(plan.remaining(&done).collect::<Vec<_>>(), all[3..]);
        assert_eq!(Plan { count: 2, ..plan.clone() }.remaining(&done).count(), 0);
        let alone = Plan { classes: vec![Class::Lkdtm], ..plan.clone() };
        assert!(alone.ends_before(80, 80) && !alone.ends_before(79, 80) && !plan.ends_before(80, 80));
    }
}
