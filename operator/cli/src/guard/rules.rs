//! `/etc/mercury/guard.toml`: the rules of the guard.

use super::{
    avoid::{Avoid, OfMachine},
    sensors::rules::{Seconds, SensorRules},
    services::{self, rules::Service},
    switches::RESTART,
};
use crate::daemon::spares::Spare;
use mercury_abi::code::Code;
use mercury_abi::ioctl::{
    MERCURY_WATCH_ON, MERCURY_WATCH_OOPS, MERCURY_WATCH_OOPS_FATAL, MERCURY_WATCH_PANIC,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    size::mebibytes,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, fs, io, path::Path, time::Duration};

/// The file with the rules.
pub const PATH: &str = "/etc/mercury/guard.toml";

/// A set of rules for a kind of machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// Hangs become panics. Nothing is put back by the guard's doing.
    #[default]
    Watch,
    /// For machines without local data: whatever kills the kernel puts it back to its snapshot.
    Stateless,
}

impl Profile {
    /// Returns the name in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Watch => "watch",
            Self::Stateless => "stateless",
        }
    }
}

/// Consequence of a hang, if there is no snapshot to go back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hang {
    Panic,
    Report,
}

/// Oopses that put the machine back to its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Oops {
    /// None: the kernel goes on, or panics by its own switch.
    None,
    /// Those in a kernel thread, in an interrupt or with a spinlock held.
    Fatal,
    All,
}

/// A switch of the kernel's that the guard sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Detector {
    /// It stays as it is.
    Keep,
    /// The kernel panics.
    Panic,
}

/// The rules. What the file leaves out is as its profile has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rules {
    /// Kind of machine.
    pub profile: Profile,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_hang: Option<Hang>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_oops: Option<Oops>,
    /// The kernel's own detectors.
    pub kernel: Kernel,
    /// The comparison of code and constants with a copy.
    pub integrity: Integrity,
    /// Acts after the second death of the same.
    pub avoid: Avoid,
    /// Program that is run after an event, with the event's name and text as its arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hook: Option<String>,
    /// True if orders to move, and rollbacks for services, are only reported.
    pub dry_run: bool,
    /// Least time between two orders to move that the guard gives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order_interval_s: Option<Seconds<1, 86_400>>,
    /// The snapshot of the profile `stateless`.
    pub snapshot: Kept,
    /// Sensors of the hardware.
    pub sensors: SensorRules,
    /// Machines to which this one may move, in order of preference.
    #[serde(rename = "spare", skip_serializing_if = "Vec::is_empty")]
    pub spares: Vec<Spare>,
    /// Services that are watched.
    #[serde(rename = "service", skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<Service>,
}

/// An amount of memory, such as `512M`, in mebibytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Memory(u64);

impl TryFrom<String> for Memory {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        mebibytes(1..=1 << 24)(&text).map(Self)
    }
}

impl From<Memory> for String {
    fn from(memory: Memory) -> Self {
        format!("{}M", memory.0)
    }
}

/// The snapshot that mercuryd keeps in the profile `stateless`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kept {
    /// Memory for copies of pages that are written to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Age at which the snapshot is dropped, and another one is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renew_s: Option<Seconds<600, 2_592_000>>,
}

impl Kept {
    /// Returns the arguments of the command that keeps the snapshot.
    #[must_use]
    pub fn command(&self) -> Vec<String> {
        let mut words = vec!["--json".to_owned(), "snapshot".to_owned()];
        words.extend(self.memory.into_iter().flat_map(|memory| ["--pool".to_owned(), memory.into()]));
        words
    }
}

/// The kernel's own detectors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kernel {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_lockup: Option<Detector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hung_task: Option<Detector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rcu_stall: Option<Detector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oops: Option<Detector>,
}

/// Treatment of code and constants that nobody may have changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scrub {
    /// They are not compared.
    #[default]
    Off,
    Report,
    /// They become as they were.
    Mend,
}

/// The comparison of code and constants with a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Integrity {
    pub scrub: Scrub,
    /// True if stores to code and constants are seen while they are made, on an attached machine.
    pub stores: bool,
    /// Seconds from the start of a pass to that of the next.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<std::num::NonZeroU16>,
}

impl Integrity {
    /// Returns the time from the start of a pass to that of the next.
    #[must_use]
    pub fn every(&self) -> std::time::Duration {
        std::time::Duration::from_secs(self.every_seconds.map_or(5, |seconds| seconds.get().into()))
    }
}

impl Rules {
    /// Reads the file. Without one, the rules are those of the profile `watch`.
    ///
    /// # Errors
    ///
    /// Returns an error that names the line if the file has an unknown key or value.
    pub fn read(path: &Path) -> Result<Self> {
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text).map_err(|why| {
                let why = format!("{}: {}", path.display(), why.trim_end());
                Error { exit: Exit::Usage, ..Error::coded(Code::BadRules, why) }
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(Error::new(Exit::Failed, format!("{}: {error}", path.display()))
                .hint("let root read the file, or name another one with --rules")),
        }
    }

    /// Parses the text of the file.
    ///
    /// # Errors
    ///
    /// Returns the reason, with the line.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let rules: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut names = BTreeSet::new();
        match rules.services.iter().find(|service| !names.insert(service.target().name())) {
            Some(twice) => Err(format!("the service {} is there twice", twice.target().name())),
            None => Ok(rules),
        }
    }

    /// Returns the consequence of a hang.
    #[must_use]
    pub fn hang(&self) -> Hang {
        self.on_hang.unwrap_or(Hang::Panic)
    }

    /// Returns the oopses that put the machine back.
    #[must_use]
    pub fn oops(&self) -> Oops {
        let default = if self.profile == Profile::Stateless { Oops::Fatal } else { Oops::None };
        self.on_oops.unwrap_or(default)
    }

    /// Returns the least time between two orders to move.
    #[must_use]
    pub fn order_interval(&self) -> Duration {
        self.order_interval_s.map_or(Duration::from_secs(600), Seconds::time)
    }

    /// Returns true if the guard itself may order this machine to move.
    #[must_use]
    pub fn may_evacuate(&self) -> bool {
        let is_moved_for = |service: &Service| service.action() == services::rules::Action::Evacuate;
        self.sensors.may_evacuate()
            || self.avoid.machine == OfMachine::Evacuate
            || self.services.iter().any(is_moved_for)
    }

    /// Returns true if the daemon keeps a snapshot at all times.
    #[must_use]
    pub fn keeps_snapshots(&self) -> bool {
        self.profile == Profile::Stateless
    }

    /// Returns the acts of the driver's watch.
    #[must_use]
    pub fn acts(&self) -> u32 {
        let hang = if self.hang() == Hang::Panic { MERCURY_WATCH_PANIC } else { 0 };
        let oops = match self.oops() {
            Oops::None => 0,
            Oops::Fatal => MERCURY_WATCH_OOPS_FATAL,
            Oops::All => MERCURY_WATCH_OOPS,
        };
        MERCURY_WATCH_ON | hang | oops
    }

    /// Returns the kernel's switches that have to be set: names below `/proc/sys`, and values. A machine that
    /// `stands_still` after a panic restarts instead, if the guard makes anything a panic.
    #[must_use]
    pub fn kernel_switches(&self, stands_still: bool) -> Vec<(&'static str, &'static str)> {
        let stateless = if self.profile == Profile::Stateless { Detector::Panic } else { Detector::Keep };
        let kernel = &self.kernel;
        let all = [
            (kernel.soft_lockup.unwrap_or(stateless), "kernel/softlockup_panic"),
            (kernel.hung_task.unwrap_or(Detector::Keep), "kernel/hung_task_panic"),
            (kernel.rcu_stall.unwrap_or(stateless), "kernel/panic_on_rcu_stall"),
            (kernel.oops.unwrap_or(Detector::Keep), "kernel/panic_on_oops"),
        ];
        let panics =
            all.iter().filter(|(wanted, _)| *wanted == Detector::Panic).map(|(_, name)| (*name, "1"));
        let mut switches: Vec<_> = panics.collect();
        if stands_still && (self.hang() == Hang::Panic || !switches.is_empty()) {
            switches.push(RESTART);
        }
        switches
    }
}

#[cfg(test)]
mod tests {
    use super::{super::sensors::rules::Signal, *};
    use std::collections::BTreeMap;

    #[test]
    fn without_a_file_nothing_is_put_back() {
        let rules = Rules::read(Path::new("/nonexistent/guard.toml")).expect("rules");
        assert_eq!(rules, Rules::default());
        assert_eq!(rules.acts(), MERCURY_WATCH_ON | MERCURY_WATCH_PANIC);
        assert!(rules.kernel_switches(false).is_empty());
        assert_eq!(rules.kernel_switches(true), [("kernel/panic", "10")]);
        let rules = Rules::parse("on_hang = 'report'").expect("rules");
        assert!(rules.kernel_switches(true).is_empty(), "nothing becomes a panic");
    }

    #[test]
    fn a_profile_is_refined_by_keys() {
        let rules =
            Rules::parse("profile = 'stateless'\n[kernel]\nsoft_lockup = 'keep'\nhung_task = 'panic'");
        let rules = rules.expect("rules");
        assert_eq!(rules.acts(), MERCURY_WATCH_ON | MERCURY_WATCH_PANIC | MERCURY_WATCH_OOPS_FATAL);
        let set = [("kernel/hung_task_panic", "1"), ("kernel/panic_on_rcu_stall", "1")];
        assert_eq!(rules.kernel_switches(false), set);
        let rules = Rules::parse("on_hang = 'report'\non_oops = 'all'").expect("rules");
        assert_eq!(rules.acts(), MERCURY_WATCH_ON | MERCURY_WATCH_OOPS);
    }

    #[test]
    fn a_file_with_a_mistake_is_refused_by_its_code() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("guard.toml");
        fs::write(&path, "profile = 'watch'\n[sensors]\ninterval_s = 'often'\n").expect("a file");
        let error = Rules::read(&path).expect_err("a mistake");
        assert_eq!((error.code, error.exit), (Some(Code::BadRules), Exit::Usage));
        let place = path.display().to_string();
        for said in [place.as_str(), "line 3", "interval_s", "[bad-rules]"] {
            assert!(error.message.contains(said), "{error}");
        }
    }

    /// The example's defaults are those of the program, and each key in it is one.
    #[test]
    fn the_example_is_what_it_says() {
        const EXAMPLE: &str = include_str!("../../../../packaging/examples/guard.toml");
        assert_eq!(Rules::parse(EXAMPLE), Ok(Rules::default()));
        let is_key = |line: &&str| line.starts_with(|c: char| c.is_ascii_lowercase() || c == '[');
        let bare = |line| str::strip_prefix(line, "#").filter(is_key).unwrap_or(line);
        let text: Vec<_> = EXAMPLE.lines().map(bare).collect();
        let rules = Rules::parse(&text.join("\n")).expect("an example");
        assert_eq!((rules.services.len(), rules.spares.len(), rules.sensors.ignore.len()), (2, 2, 2));
        assert_eq!((rules.order_interval(), rules.hang(), rules.oops()), {
            let default = Rules::default();
            (default.order_interval(), default.hang(), default.oops())
        });
        for signal in Signal::ALL {
            assert!(rules.sensors.limits.contains_key(&signal), "{}", signal.name());
            assert_eq!(rules.sensors.limit(signal), Rules::default().sensors.limit(signal));
        }
        assert!(!rules.may_evacuate() && !rules.dry_run);
        let sensors = SensorRules { ignore: Vec::new(), limits: BTreeMap::new(), ..rules.sensors };
        assert_eq!(sensors, SensorRules::default());
    }

    #[test]
    fn the_snapshot_is_kept_as_the_rules_say() {
        assert_eq!(Rules::default().snapshot.command(), ["--json", "snapshot"]);
        let rules = Rules::parse("[snapshot]\nmemory = '2G'\nrenew_s = 86400").expect("rules");
        assert_eq!(rules.snapshot.command(), ["--json", "snapshot", "--pool", "2048M"]);
        assert_eq!(rules.snapshot.renew_s.map(Seconds::time), Some(Duration::from_secs(86_400)));
    }

    #[test]
    fn code_is_compared_if_the_rules_say_so() {
        assert_eq!(Rules::default().integrity.scrub, Scrub::Off);
        assert!(!Rules::default().integrity.stores);
        assert!(Rules::parse("[integrity]\nstores = true").expect("rules").integrity.stores);
        let rules = Rules::parse("[integrity]\nscrub = 'mend'").expect("rules");
        assert_eq!((rules.integrity.scrub, rules.integrity.every().as_secs()), (Scrub::Mend, 5));
        let rules = Rules::parse("[integrity]\nevery_seconds = 60").expect("rules");
        assert_eq!(rules.integrity.every().as_secs(), 60);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, said) in [
            ("profil = 'watch'", "profil"),
            ("\non_hang = 'explode'", "line 2"),
            ("[kernel]\nsoftlockup = 'panic'", "softlockup"),
            ("[integrity]\nscrub = 'repair'", "line 2"),
            ("[integrity]\nevery_seconds = 0", "line 2"),
            ("[avoid]\ntask = 'kill'", "line 2"),
            ("[snapshot]\nmemory = 'much'", "line 2"),
            ("[snapshot]\nmemory = '0M'", "line 2"),
            ("[snapshot]\nrenew_s = 60", "line 2"),
        ] {
            let why = Rules::parse(text).expect_err(text);
            assert!(why.contains(said), "{why}");
        }
    }
}
