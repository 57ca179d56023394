//! The result of each injection, a line of JSON in the campaign's file.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Load, Moment, Plan,
    fault::{Class, Fault},
    subject::{End, Seen},
};
use mercury_lab::{
    error::{Context, Error, Result},
    paths,
};

/// The directory of the results under `target/lab/`.
const KEPT: &str = "campaign";

/// The time in which devices come to rest, a part of each rollback.
pub(super) const SETTLE_MS: f64 = 3.0;

/// What came of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Nothing was seen of it.
    NoEffect,
    /// The kernel complained and went on, with right sums.
    Complaint,
    /// Sums were wrong, and nothing else noticed. On command the machine went back, and they were right.
    Unnoticed,
    /// The machine died, and went back with right sums.
    Right,
    /// The machine went back, and has wrong sums or a complaint.
    Wrong,
    /// The kernel had an oops, and nothing put the machine back but the command at the end.
    Missed,
    /// The machine died and did not go back: it restarted, or it could not keep or reach a snapshot any more.
    Lost,
    /// The machine hung for good.
    Hung,
    /// There was no snapshot before the fault, or the fault could not be injected.
    Refused,
}

impl Outcome {
    /// Classifies what was seen of a fault of a class. In doubt the fault has won.
    fn of(class: Class, seen: &Seen) -> Self {
        let reason = reason(seen);
        match (seen.end, &seen.back) {
            (End::Silent, _) => Self::Hung,
            (End::Off, _) => Self::Lost,
            // It was to go back on command or to keep another snapshot, and did not.
            (End::Refused, _) if seen.kept => Self::Lost,
            (End::Refused | End::NotInjected, _) => Self::Refused,
            // A death before the fault is not the fault's.
            (End::Back, _) if class.prints_places() && seen.places.is_empty() => Self::Refused,
            (End::Back, Some(back)) if back.is_right() && back.complaints == 0 => match reason.as_deref() {
                Some("command") => Self::on_command(seen),
                Some(_) => Self::Right,
                // The machine does not say why it is where it is.
                None => Self::Wrong,
            },
            (End::Back, _) => Self::Wrong,
        }
    }

    /// Classifies a life that no failure has ended. One that has not told its sums has none.
    fn on_command(seen: &Seen) -> Self {
        match &seen.alive {
            _ if seen.oopses > 0 => Self::Missed,
            Some(alive) if alive.is_right() && alive.complaints > 0 => Self::Complaint,
            Some(alive) if alive.is_right() => Self::NoEffect,
            _ => Self::Unnoticed,
        }
    }

    /// Returns true if the fault has killed the machine, or made it compute wrong sums.
    #[must_use]
    pub fn is_manifest(self) -> bool {
        self.has_died() || self == Self::Unnoticed
    }

    /// Returns true if the machine has died.
    #[must_use]
    pub fn has_died(self) -> bool {
        matches!(self, Self::Right) || self.is_loss()
    }

    /// Returns true if the machine is not what it was before the fault.
    #[must_use]
    pub fn is_loss(self) -> bool {
        matches!(self, Self::Wrong | Self::Missed | Self::Lost | Self::Hung)
    }

    /// Returns true if the machine can take the next fault. One that goes back to an instant at random may
    /// have this fault for ever.
    #[must_use]
    pub fn keeps_machine(self, moment: Moment) -> bool {
        moment == Moment::JustBefore && !self.is_loss() && self != Self::Refused
    }
}

fn reason(seen: &Seen) -> Option<String> {
    report(seen)["reason"].as_str().map(str::to_owned)
}

fn report(seen: &Seen) -> Value {
    seen.back.as_ref().and_then(|back| serde_json::from_str(&back.report).ok()).unwrap_or_default()
}

/// One injection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    pub kernel: String,
    pub cpus: u32,
    pub load: Load,
    pub moment: Moment,
    pub seed: u64,
    pub class: Class,
    pub number: u64,
    /// The crash type, or the command to the test module.
    pub fault: String,
    /// The places of flips, as far as they were printed.
    pub places: Vec<String>,
    pub outcome: Outcome,
    /// Whatever put the machine back.
    pub reason: Option<String>,
    /// The panic's words.
    pub message: Option<String>,
    /// The sums of the life with the fault, if it went on, and those of the life after.
    pub alive: Option<String>,
    pub back: Option<String>,
    /// The first words of the kernel's complaints, in the last life that had any.
    pub complaint: Option<String>,
    pub refused: Option<String>,
    /// Pages that were put back, and the times for that, in the emulator's microseconds.
    pub pages: Option<u64>,
    pub meet_us: Option<f64>,
    pub work_us: Option<f64>,
    /// The time of the injection, with all checks.
    pub seconds: f64,
    /// The end of the injection, in seconds since 1970.
    pub ended: u64,
}

impl Record {
    pub(super) fn new(plan: &Plan, fault: &Fault, seen: &Seen) -> Self {
        let report = report(seen);
        Self {
            kernel: plan.kernel.to_string(),
            cpus: plan.cpus,
            load: plan.load,
            moment: plan.moment,
            seed: plan.seed,
            class: fault.class,
            number: fault.number,
            fault: fault.name.clone(),
            places: seen.places.clone(),
            outcome: Outcome::of(fault.class, seen),
            reason: reason(seen),
            message: report["message"].as_str().map(str::to_owned),
            alive: seen.alive.as_ref().map(|life| format!("{}; {} complaints", life.sums, life.complaints)),
            back: seen.back.as_ref().map(|life| format!("{}; {} complaints", life.sums, life.complaints)),
            complaint: seen.complaint.clone(),
            refused: seen.refused.clone(),
            pages: report["pages"].as_u64(),
            meet_us: report["meet_us"].as_f64(),
            work_us: report["work_us"].as_f64(),
            seconds: (seen.seconds * 10.0).round() / 10.0,
            ended: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs()),
        }
    }

    /// Returns the milliseconds of the emulator in which a machine that died was put back, for 1,000 pages.
    /// The time in which devices come to rest is not counted.
    pub(crate) fn ms_per_1000_pages(&self) -> Option<f64> {
        let pages = self.pages.filter(|pages| *pages > 0 && self.outcome == Outcome::Right)?;
        Some((self.work_us? / 1e3 - SETTLE_MS) / (pages as f64 / 1e3))
    }

    /// Returns the key of the injection. Two results of one key are of the same fault.
    fn key(&self) -> (String, u32, Load, Moment, u64, Class, u64) {
        (self.kernel.clone(), self.cpus, self.load, self.moment, self.seed, self.class, self.number)
    }

    /// Returns the crash type, or the first place of a flip.
    pub(super) fn place(&self) -> &str {
        match self.class {
            Class::Lkdtm => &self.fault,
            _ => self.places.first().unwrap_or(&self.fault),
        }
    }

    /// Describes the injection in a line.
    #[must_use]
    pub fn describe(&self) -> String {
        let name = serde_json::to_value(self.outcome).unwrap_or_default();
        let complaint = self.complaint.as_ref().filter(|_| self.outcome != Outcome::NoEffect);
        let after = [self.reason.as_ref(), complaint, self.refused.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect::<Vec<_>>();
        let wrong =
            [&self.alive, &self.back].into_iter().flatten().filter(|sums| !sums.starts_with("right;"));
        let all: Vec<String> = after.into_iter().chain(wrong.cloned()).collect();
        format!(
            "{} {}: {}: {}{}{} ({:.1} s)",
            self.class.name(),
            self.number,
            self.place(),
            name.as_str().unwrap_or_default(),
            if all.is_empty() { "" } else { ": " },
            all.join("; "),
            self.seconds
        )
    }
}

/// The results of a campaign so far, in its file.
#[derive(Debug)]
pub struct Results {
    path: PathBuf,
    all: Vec<Record>,
    /// The right to write the file.
    _lock: File,
}

impl Results {
    /// Opens the results of a campaign, which may have none yet.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn open(name: &str) -> Result<Self> {
        Self::at(paths::lab_dir(KEPT)?.join(format!("{name}.jsonl")))
    }

    /// Opens the results in a file, which may not exist yet.
    ///
    /// # Errors
    /// If the file cannot be read, or the same campaign is under way: it would inject each fault twice.
    pub fn at(path: PathBuf) -> Result<Self> {
        let lock = path.with_extension("lock");
        let file = File::create(&lock).context(|| format!("write {}", lock.display()))?;
        if file.try_lock().is_err() {
            return Err(Error::Host(format!("this campaign is under way already: {}", lock.display())));
        }
        let all = if path.exists() { once(read_whole(&path)?) } else { Vec::new() };
        Ok(Self { path, all, _lock: file })
    }

    /// Returns all results.
    #[must_use]
    pub fn all(&self) -> &[Record] {
        &self.all
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the faults of these classes that have a result.
    pub(super) fn done(&self, classes: &[Class]) -> BTreeSet<(Class, u64)> {
        let all = self.all.iter().map(|record| (record.class, record.number));
        all.filter(|(class, _)| classes.contains(class)).collect()
    }

    /// Adds a result.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn add(&mut self, record: Record) -> Result<()> {
        let what = || format!("write {}", self.path.display());
        let line = serde_json::to_string(&record).map_err(|error| Error::Host(error.to_string()))?;
        let mut file = File::options().create(true).append(true).open(&self.path).context(what)?;
        file.write_all((line + "\n").as_bytes()).context(what)?;
        self.all.push(record);
        Ok(())
    }

    /// Keeps the last of the console of a machine that was lost.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn keep_log(&self, record: &Record, log: &str) -> Result<()> {
        let name = format!("{}-{}.log", record.class.name().replace(' ', "-"), record.number);
        let path = self.path.with_extension(name);
        fs::write(&path, log).context(|| format!("write {}", path.display()))
    }
}

/// Reads the results of all campaigns that were kept.
///
/// # Errors
/// If there are none, or one cannot be read.
pub(super) fn read_all() -> Result<Vec<Record>> {
    let dir = paths::lab_dir(KEPT)?;
    let entries = fs::read_dir(&dir).context(|| format!("list {}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    let all: Vec<Vec<Record>> = files.iter().map(|path| read(path)).collect::<Result<_>>()?;
    let all = once(all.concat());
    if all.is_empty() {
        return Err(Error::Host(format!("{} has no results: `make campaign` makes some", dir.display())));
    }
    Ok(all)
}

/// Keeps one result of each fault: the worst, if they differ.
fn once(all: Vec<Record>) -> Vec<Record> {
    let mut kept: Vec<Record> = Vec::with_capacity(all.len());
    for record in all {
        match kept.iter_mut().find(|known| known.key() == record.key()) {
            Some(known) if record.outcome.is_loss() && !known.outcome.is_loss() => *known = record,
            Some(_) => {}
            None => kept.push(record),
        }
    }
    kept
}

/// Reads the results of a file, and removes an unfinished last line.
fn read_whole(path: &Path) -> Result<Vec<Record>> {
    let text = fs::read_to_string(path).context(|| format!("read {}", path.display()))?;
    let end = text.rfind('\n').map_or(0, |end| end + 1);
    let what = || format!("write {}", path.display());
    File::options().write(true).open(path).context(what)?.set_len(end as u64).context(what)?;
    read(path)
}

/// Reads the results of a file. The last line may be unfinished, if the campaign was ended.
fn read(path: &Path) -> Result<Vec<Record>> {
    let text = fs::read_to_string(path).context(|| format!("read {}", path.display()))?;
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let parse = |line| {
        serde_json::from_str(line)
            .map_err(|error| Error::Host(format!("{}: no result ({error}): {line}", path.display())))
    };
    whole.map(parse).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use crate::campaign::subject::Life;
    use mercury_lab::kernel::Kernel;

    fn life(complaints: u64, sums: &str, reason: &str) -> Option<Life> {
        let report = format!("{{ \"state\": \"rolled-back\", \"reason\": \"{reason}\", \"pages\": 7 }}");
        Some(Life { complaints, sums: sums.into(), report })
    }

    fn seen(end: End, alive: Option<Life>, back: Option<Life>) -> Seen {
        Seen {
            end,
            kept: true,
            oopses: 0,
            alive,
            back,
            complaint: None,
            refused: None,
            places: vec!["bit 1".into()],
            seconds: 1.25,
        }
    }

    #[test]
    fn outcomes_are_told_apart() {
        let right = || life(0, "right", "command");
        let of = |end, alive, back| Outcome::of(Class::Code, &seen(end, alive, back));
        assert_eq!(of(End::Back, right(), right()), Outcome::NoEffect);
        assert_eq!(of(End::Back, life(2, "right", ""), right()), Outcome::Complaint);
        assert_eq!(of(End::Back, life(0, "wrong: files", ""), right()), Outcome::Unnoticed);
        assert_eq!(of(End::Back, life(0, "", ""), right()), Outcome::Unnoticed);
        assert_eq!(of(End::Back, None, life(0, "right", "panic")), Outcome::Right);
        // It died after it had looked at its sums.
        assert_eq!(of(End::Back, right(), life(0, "right", "oops")), Outcome::Right);
        assert_eq!(of(End::Back, None, life(0, "wrong: files", "panic")), Outcome::Wrong);
        assert_eq!(of(End::Back, right(), life(1, "right", "command")), Outcome::Wrong);
        assert_eq!(of(End::Off, None, None), Outcome::Lost);
        assert_eq!(of(End::Silent, right(), None), Outcome::Hung);
        assert_eq!(of(End::NotInjected, None, None), Outcome::Refused);
        assert_eq!(of(End::Refused, right(), None), Outcome::Lost);
        // It cannot keep its next snapshot.
        assert_eq!(of(End::Refused, None, None), Outcome::Lost);
        let before = Seen { kept: false, ..seen(End::Refused, None, None) };
        assert_eq!(Outcome::of(Class::Code, &before), Outcome::Refused);
    }

    #[test]
    fn in_doubt_the_fault_has_won() {
        let right = || life(0, "right", "command");
        let of = |end, alive, back| Outcome::of(Class::Code, &seen(end, alive, back));
        // The life with the fault was mute.
        assert_eq!(of(End::Back, None, right()), Outcome::Unnoticed);
        // The second life does not say what put it back.
        let mute = Life { report: "{ \"state\": ".into(), ..right().unwrap() };
        assert_eq!(of(End::Back, None, Some(mute)), Outcome::Wrong);
        assert_eq!(of(End::Back, right(), None), Outcome::Wrong);
        // The guard was to put it back after an oops.
        let oops = Seen { oopses: 1, ..seen(End::Back, life(1, "right", ""), right()) };
        assert_eq!(Outcome::of(Class::Code, &oops), Outcome::Missed);
        assert!(Outcome::Missed.is_loss() && Outcome::Missed.has_died());
    }

    #[test]
    fn a_death_before_the_fault_is_not_counted() {
        let died = || Seen { places: Vec::new(), ..seen(End::Back, None, life(0, "right", "hang")) };
        assert_eq!(Outcome::of(Class::Code, &died()), Outcome::Refused);
        assert_eq!(Outcome::of(Class::Lkdtm, &died()), Outcome::Right, "crash types have no places");
        assert_eq!(Outcome::of(Class::Control, &died()), Outcome::Right, "a false alarm, which is shown");
    }

    #[test]
    fn a_fault_is_counted_once() {
        let all = vec![
            record(Class::Code, 0, Outcome::Right),
            record(Class::Code, 1, Outcome::Right),
            record(Class::Code, 0, Outcome::Lost),
            record(Class::Code, 1, Outcome::NoEffect),
            Record { seed: 2, ..record(Class::Code, 1, Outcome::Right) },
        ];
        let outcomes: Vec<_> = once(all).iter().map(|record| record.outcome).collect();
        assert_eq!(outcomes, [Outcome::Lost, Outcome::Right, Outcome::Right]);
    }

    #[test]
    fn a_campaign_does_not_run_twice_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = Results::at(dir.path().join("x.jsonl")).unwrap();
        assert!(Results::at(dir.path().join("x.jsonl")).is_err());
        drop(first);
        assert!(Results::at(dir.path().join("x.jsonl")).is_ok());
    }

    #[test]
    fn only_a_machine_that_is_as_it_was_goes_on() {
        use Outcome::{Complaint, Hung, Lost, Missed, NoEffect, Refused, Right, Unnoticed, Wrong};
        let moment = Moment::JustBefore;
        for outcome in [NoEffect, Complaint, Unnoticed, Right] {
            assert!(outcome.keeps_machine(moment) && !outcome.is_loss());
            assert!(!outcome.keeps_machine(Moment::AtRandom), "the fault may be in the instant");
        }
        for outcome in [Wrong, Missed, Lost, Hung] {
            assert!(!outcome.keeps_machine(moment) && outcome.is_loss() && outcome.is_manifest());
        }
        assert!(!Refused.keeps_machine(moment) && !Refused.is_loss() && !Refused.has_died());
        assert!(Unnoticed.is_manifest() && !Unnoticed.has_died() && !NoEffect.is_manifest());
    }

    pub(in crate::campaign) fn record(class: Class, number: u64, outcome: Outcome) -> Record {
        let plan = Plan {
            kernel: Kernel::BookwormCloud,
            cpus: 2,
            load: Load::Idle,
            moment: Moment::JustBefore,
            classes: vec![class],
            count: 1,
            seed: 1,
            time: None,
        };
        let fault = Fault::new(1, class, number, &["BUG".into()]);
        let seen = seen(End::Back, None, life(0, "right", "panic"));
        Record { outcome, ..Record::new(&plan, &fault, &seen) }
    }

    #[test]
    fn results_are_read_again_up_to_an_unfinished_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut results = Results::at(dir.path().join("x.jsonl")).unwrap();
        results.add(record(Class::Code, 0, Outcome::Right)).unwrap();
        results.add(record(Class::Lkdtm, 0, Outcome::Lost)).unwrap();
        let mut file = File::options().append(true).open(&results.path).unwrap();
        file.write_all(b"{\"kernel\": \"boo").unwrap();
        assert_eq!(read(&results.path).unwrap().len(), 2);
        results.all = read_whole(&results.path).unwrap();
        results.add(record(Class::Code, 1, Outcome::Right)).unwrap();
        let again = read(&results.path).unwrap();
        assert_eq!(again.len(), 3);
        assert_eq!((again[1].outcome, again[1].place(), again[1].pages), (Outcome::Lost, "BUG", Some(7)));
        assert_eq!(results.done(&[Class::Code]), BTreeSet::from([(Class::Code, 0), (Class::Code, 1)]));
    }
}
