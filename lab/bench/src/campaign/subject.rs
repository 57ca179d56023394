//! The machine into which faults are injected.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use super::{Load, Moment, Plan, fault::Fault};
use mercury_lab::{
    command::patient,
    error::{Context, Result},
    machine::Machine,
    spec::{Bus, Nic, Qemu, Spec},
};

/// Time between two snapshots, for faults at random moments.
const EVERY: Duration = Duration::from_secs(30);
/// Time that a fault may take beyond its script's rests, until the machine is known to hang for good.
const LIMIT: Duration = Duration::from_secs(60);
/// Time in which a machine that is back has to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);
/// Time that a machine lives on before its sums are looked at, if it went back to an instant after the fault.
const SETTLE: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The characters of a lost machine's console that are kept.
const LAST_WORDS: usize = 16 << 10;

/// Memory in MiB, and with a database in RAM.
const MEMORY_MIB: u32 = 768;
const MEMORY_WITH_DATABASE_MIB: u32 = 1024;

/// Rules of the guard: all that the kernel notices puts the machine back.
const RULES: &str = "on_oops = 'all'\n";

/// The kernel's own detectors, as sensitive as a busy emulator allows, and a restart after a panic, which
/// ends the emulator.
const DETECTORS: &str = "sysctl -qw kernel.panic=1 kernel.watchdog_thresh=4 kernel.softlockup_panic=1 \
     kernel.hung_task_timeout_secs=8 kernel.hung_task_panic=1 kernel.panic_on_rcu_stall=1; \
     echo 8 > /sys/module/rcupdate/parameters/rcu_cpu_stall_timeout";

/// Prints the kernel's complaints. In the second life the driver, and the scripts, repeat what the first one
/// died of.
const COMPLAINTS: &str = "dmesg | grep -E 'WARNING: CPU|BUG: |Oops|Call Trace|lockup|detected stall|blocked \
     for more|Bad page|corruption|invalid opcode' | grep -vE 'mercury: |campaign [0-9]'\n";

/// The files whose sums are known.
const FILES: &str = "/usr/bin/bash /usr/bin/python3";

/// Direct and buffered reads of a disk whose content is known.
const DISK_LOAD: &str = "while true; do dd if=/dev/vda of=/dev/null bs=256k iflag=direct; \
     dd if=/dev/vda of=/dev/null bs=1M; done";
const DISK_CONTENT: &str = "yes mercury | head -c 32M";
/// Traffic in both directions on the machine's only card.
const NETWORK_LOAD: &str = "while true; do ping -q -i 0.01 -c 50 -s 1400 10.0.2.2; done";
/// Starts PostgreSQL on a copy of its cluster in RAM: the root is not to be written to.
const POSTGRES_START: &str = "for part in lib log; do mkdir -p /run/$part; \
     cp -a /var/$part/postgresql/. /run/$part; mount --bind /run/$part /var/$part/postgresql; done; \
     ip link set lo up; lab-postgres start";
const POSTGRES_LOAD: &str = "while true; do pgbench -n -c 2 -T 3600 bench; sleep 0.1; done";
/// The sums of pgbench's tables agree if each transaction is in all of them or in none.
const POSTGRES_CHECK: &str = "test \"$(timeout 30 psql -At bench -c 'select (select sum(abalance) from \
     pgbench_accounts) = (select coalesce(sum(delta), 0) from pgbench_history) and (select sum(bbalance) \
     from pgbench_branches) = (select coalesce(sum(delta), 0) from pgbench_history)')\" = t\n";

impl Load {
    fn spec(self, spec: Spec) -> Spec {
        match self {
            Self::Idle => spec.memory_mib(MEMORY_MIB),
            Self::Postgres => spec.memory_mib(MEMORY_WITH_DATABASE_MIB),
            Self::DiskAndNetwork => spec.memory_mib(MEMORY_MIB).disk(Bus::Virtio, 32).nic(Nic::Virtio),
        }
    }

    /// Returns the command that prepares the load, the lines that run all the time, and the check of its
    /// results.
    fn work(self) -> (String, &'static [&'static str], String) {
        match self {
            Self::Idle => (String::new(), &[], "true\n".to_owned()),
            Self::Postgres => (POSTGRES_START.to_owned(), &[POSTGRES_LOAD], POSTGRES_CHECK.to_owned()),
            Self::DiskAndNetwork => (
                format!(
                    "{DISK_CONTENT} > /dev/vda; modprobe virtio_net; \
                     card=$(ls -d /sys/class/net/*/device | cut -d/ -f5); \
                     ip address add 10.0.2.15/24 dev $card; ip link set $card up"
                ),
                &[DISK_LOAD, NETWORK_LOAD],
                format!(
                    "cmp <(dd if=/dev/vda bs=1M iflag=direct 2> /dev/null) <({DISK_CONTENT}) && \
                     for _ in 1 2 3 4 5; do ping -q -c 1 -W 2 10.0.2.2 > /dev/null && exit; done; exit 1\n"
                ),
            ),
        }
    }
}

/// The machine, at work.
pub struct Subject {
    machine: Machine,
    lkdtm_types: Vec<String>,
}

/// The sums of one life, as it said itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Life {
    /// Complaints in the kernel's log.
    pub complaints: u64,
    /// `right`, or the sums that are wrong.
    pub sums: String,
    /// The report of the way back, of the life after a rollback.
    pub report: String,
}

/// The end of an injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The machine is back at its snapshot.
    Back,
    /// It said that there is no snapshot, or that it does not go back.
    Refused,
    /// It said that the fault could not be injected, or has not struck.
    NotInjected,
    /// The emulator has ended: the machine has restarted.
    Off,
    /// The machine was silent for too long, and was not put back on an order from outside.
    Silent,
}

/// The host's observations of an injection.
#[derive(Clone, Debug)]
pub struct Seen {
    pub end: End,
    /// True once the snapshot before the fault is kept. What goes wrong from there on is the fault's doing.
    pub kept: bool,
    /// Oopses of the kernel from there to the life's own report, if it went on.
    pub oopses: u64,
    /// The life of the fault, if it went on.
    pub alive: Option<Life>,
    /// The life after.
    pub back: Option<Life>,
    /// The first words of the kernel's complaints, in the last life that had any.
    pub complaint: Option<String>,
    /// The words of a refusal.
    pub refused: Option<String>,
    /// The places of the flips.
    pub places: Vec<String>,
    pub seconds: f64,
}

impl Subject {
    /// Boots a machine and sets it to work. `lkdtm` is the module of crash types, if they are wanted.
    ///
    /// # Errors
    /// If the machine does not come up or does not work.
    pub fn boot(plan: &Plan, lkdtm: Option<&Path>) -> Result<Self> {
        // QEMU 7 runs stale copies of code that the kernel has patched.
        let spec = Spec::new(plan.kernel).cpus(plan.cpus).qemu_version(Qemu::Newer);
        let machine = Machine::boot(plan.load.spec(spec))?;
        let (prepare, loads, check) = plan.load.work();
        machine.sh(&format!("mkdir -p /run/campaign; {DETECTORS}; {prepare}"))?;
        let files = [
            ("inject", include_str!("inject.sh")),
            ("check", include_str!("check.sh")),
            ("compute", include_str!("compute.sh")),
            ("check-load", &check),
            ("complaints", COMPLAINTS),
            ("files", FILES),
            ("rules", RULES),
        ];
        for (name, text) in files {
            machine.put(&format!("/run/campaign/{name}"), text.as_bytes(), 0o755)?;
        }
        machine.sh("insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko")?;
        let lkdtm_types = lkdtm.map(|module| load_lkdtm(&machine, module)).transpose()?.unwrap_or_default();
        machine.sh("sync; mount -o remount,ro /")?;
        machine.sh("mercury guard on --rules /run/campaign/rules")?;
        machine.sh(&format!("cat {FILES} | sha256sum > /run/campaign/base"))?;
        for line in ["bash /run/campaign/compute"].iter().chain(loads) {
            machine.sh(&format!("setsid bash -c '{line}' > /dev/null 2>&1 < /dev/null &"))?;
        }
        machine.sh("until test -s /run/campaign/rounds; do sleep 0.1; done")?;
        machine.sh("test \"$(bash /run/campaign/check)\" = right && ! bash /run/campaign/complaints >&2")?;
        Ok(Self { machine, lkdtm_types })
    }

    /// Returns the crash types that the kernel's module has.
    pub fn lkdtm_types(&self) -> &[String] {
        &self.lkdtm_types
    }

    /// Returns the last of the machine's console.
    pub fn last_words(&self) -> String {
        let log = self.machine.serial_log();
        let start = log.char_indices().rev().nth(LAST_WORDS).map_or(0, |(start, _)| start);
        log[start..].to_owned()
    }

    /// Injects a fault, and watches until the machine is back or lost.
    pub fn inject(&self, fault: &Fault, moment: Moment) -> Seen {
        let (begun, before) = (Instant::now(), self.machine.serial_log().len());
        let rests = Rests::new(fault, moment);
        let key = format!("{}.{}", fault.class as u8, fault.number);
        let ordered = self.machine.command(&format!(
            "setsid bash /run/campaign/inject {key} '{}' {} > /dev/null 2>&1 < /dev/null &",
            fault.line(),
            rests.words()
        ));
        let limit = patient(LIMIT) + rests.sum();
        let mut seen = match ordered.timeout(ANSWERS_WITHIN).run() {
            Ok(_) => self.watch(before, &key, limit),
            Err(_) => Seen::of("", &key),
        };
        if seen.end == End::Silent && seen.kept {
            // The script may be what the fault has struck, and the machine well enough to be put back. An
            // answer may come from neither life.
            let _ = self.machine.command("mercury rollback").timeout(ANSWERS_WITHIN).run();
            seen = self.watch(before, &key, patient(ANSWERS_WITHIN));
        }
        seen.seconds = begun.elapsed().as_secs_f64();
        if seen.end == End::Back && self.machine.command("true").timeout(ANSWERS_WITHIN).run().is_err() {
            seen.back = seen.back.map(|life| Life { sums: "wrong: no answer".into(), ..life });
        }
        self.machine.forgive();
        seen
    }

    /// Reads the console from a place on, until a life has told its end, the machine is off, or the time is
    /// over.
    fn watch(&self, from: usize, key: &str, limit: Duration) -> Seen {
        let begun = Instant::now();
        loop {
            let log = self.machine.serial_log();
            let mut seen = Seen::of(log.get(from..).unwrap_or_default(), key);
            if seen.end == End::Silent && self.machine.is_off().unwrap_or(true) {
                seen.end = End::Off;
            }
            if seen.end != End::Silent || begun.elapsed() > limit {
                return seen;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

fn load_lkdtm(machine: &Machine, module: &Path) -> Result<Vec<String>> {
    let bytes = fs::read(module).context(|| format!("read {}", module.display()))?;
    machine.put("/run/campaign/lkdtm.ko", &bytes, 0o644)?;
    let types = machine.sh("mountpoint -q /sys/kernel/debug || mount -t debugfs none /sys/kernel/debug; \
         insmod /run/campaign/lkdtm.ko; tail -n +2 /sys/kernel/debug/provoke-crash/DIRECT")?;
    Ok(types.split_whitespace().map(str::to_owned).collect())
}

/// The rests of the script, between a snapshot and the fault and after that.
struct Rests {
    before: Duration,
    after: Duration,
    later: u32,
    settle: Duration,
}

impl Rests {
    fn new(fault: &Fault, moment: Moment) -> Self {
        match moment {
            Moment::JustBefore => {
                Self { before: Duration::ZERO, after: fault.shows_within, later: 0, settle: Duration::ZERO }
            }
            Moment::AtRandom => {
                let before = fault.moment(EVERY);
                Self { before, after: EVERY - before, later: 1, settle: SETTLE }
            }
        }
    }

    fn words(&self) -> String {
        let [before, after] = [self.before, self.after].map(|rest| rest.as_secs_f64());
        format!("{before:.2} {after:.2} {} {} {}", self.later, EVERY.as_secs(), self.settle.as_secs())
    }

    fn sum(&self) -> Duration {
        self.before + self.after + EVERY * self.later + self.settle
    }
}

impl Seen {
    /// Reads the console's text since the order. Without a last word the machine is silent so far.
    fn of(console: &str, key: &str) -> Self {
        let mut seen = Self {
            end: End::Silent,
            kept: false,
            oopses: 0,
            alive: None,
            back: None,
            complaint: None,
            refused: None,
            places: Vec::new(),
            seconds: 0.0,
        };
        let own = format!("campaign {key}: ");
        // The last line may be unfinished.
        for line in console.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            if let Some((_, place)) = line.split_once("mercury_test: flips ") {
                seen.places.push(place.trim().to_owned());
            }
            let Some((_, words)) = line.split_once(&own) else {
                seen.oopses += u64::from(seen.kept && seen.alive.is_none() && is_oops(line));
                continue;
            };
            let words = words.trim_end();
            let (word, rest) = words.split_once(' ').unwrap_or((words, ""));
            match word {
                "kept" => seen.kept = true,
                "complaint" => seen.complaint = Some(rest.trim().to_owned()),
                "alive" => seen.alive = Some(Life::of(rest)),
                "back" => (seen.end, seen.back) = (End::Back, Some(Life::of(rest))),
                // A machine in which bits have flipped has a fault, whatever the command to flip them says.
                "not-injected" if !seen.places.is_empty() && rest.starts_with("by") => {}
                "refused" | "not-injected" => {
                    let end = if word == "refused" { End::Refused } else { End::NotInjected };
                    (seen.end, seen.refused) = (end, Some(words.trim().to_owned()));
                }
                _ => {}
            }
        }
        seen
    }
}

/// Returns true for the line with which Linux counts an oops: `…: 0000 [#1] PREEMPT SMP`.
fn is_oops(line: &str) -> bool {
    let mut parts = line.split("[#").skip(1);
    parts.any(|part| part.split_once(']').is_some_and(|(count, _)| count.parse::<u32>().is_ok()))
}

impl Life {
    /// Reads `COMPLAINTS SUMS REPORT`.
    fn of(words: &str) -> Self {
        let (complaints, rest) = words.split_once(' ').unwrap_or((words, ""));
        let (sums, report) = rest.find('{').map_or((rest, ""), |start| rest.split_at(start));
        Self {
            complaints: complaints.parse().unwrap_or(0),
            sums: sums.trim().to_owned(),
            report: report.trim().to_owned(),
        }
    }

    pub fn is_right(&self) -> bool {
        self.sums == "right"
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const CONSOLE: &str = "\
[ 1.0] campaign 1.6: back 0 right {\"state\": \"rolled-back\"}
[ 9.0] campaign 1.7: kept\r
[ 9.1] mercury_test: flips bit 3 of code at vfs_read+0x12/0x300
[ 9.2] BUG: unable to handle page fault
";

    #[test]
    fn a_life_after_a_rollback_is_read() {
        let console = format!(
            "{CONSOLE}[ 9.5] campaign 1.7: back 2 wrong: files {{ \"reason\": \"oops\" }}\r\n[ 9.6] more"
        );
        let seen = Seen::of(&console, "1.7");
        assert_eq!((seen.end, seen.alive), (End::Back, None));
        assert_eq!(seen.places, ["bit 3 of code at vfs_read+0x12/0x300"]);
        let back = seen.back.unwrap();
        assert_eq!((back.complaints, back.sums.as_str()), (2, "wrong: files"));
        assert_eq!(back.report, "{ \"reason\": \"oops\" }");
        assert!(!back.is_right());
    }

    #[test]
    fn a_silent_machine_and_an_unfinished_line_are_no_end() {
        assert_eq!(Seen::of(CONSOLE, "1.7").end, End::Silent);
        let begun = format!("{CONSOLE}[ 9.5] campaign 1.7: back 0 ri");
        assert_eq!(Seen::of(&begun, "1.7").end, End::Silent);
    }

    #[test]
    fn a_life_that_went_on_and_a_refusal_are_read() {
        let console = format!(
            "{CONSOLE}[ 9.5] campaign 1.7: complaint [ 9.2] BUG: x\n[ 9.6] campaign 1.7: alive 1 right\n"
        );
        let seen = Seen::of(&console, "1.7");
        assert!(seen.alive.as_ref().is_some_and(|life| life.is_right() && life.complaints == 1));
        assert_eq!(seen.complaint.as_deref(), Some("[ 9.2] BUG: x"));
        let refused = Seen::of(&format!("{console}campaign 1.7: refused no-snapshot\n"), "1.7");
        assert_eq!((refused.end, refused.kept), (End::Refused, true));
        assert_eq!(refused.refused.as_deref(), Some("refused no-snapshot"));
        let at_once = Seen::of("campaign 1.7: refused no-snapshot\n", "1.7");
        assert_eq!((at_once.end, at_once.kept), (End::Refused, false));
    }

    #[test]
    fn a_fault_that_was_not_injected_is_told_from_one_whose_command_failed_later() {
        let kept = "campaign 1.7: kept\n";
        for how in ["by the command", "in this time"] {
            let seen = Seen::of(&format!("{kept}campaign 1.7: not-injected {how}\n"), "1.7");
            assert_eq!(seen.end, End::NotInjected, "{how}");
        }
        let failed = Seen::of(&format!("{CONSOLE}campaign 1.7: not-injected by the command\n"), "1.7");
        assert_eq!(failed.end, End::Silent, "a bit has flipped");
        let never = Seen::of(&format!("{CONSOLE}campaign 1.7: not-injected in this time\n"), "1.7");
        assert_eq!(never.end, End::NotInjected, "the place of a register's flip is told before it strikes");
    }

    #[test]
    fn oopses_of_the_life_with_the_fault_are_counted() {
        let oops = "[ 9.3] Oops: 0002 [#1] PREEMPT SMP NOPTI\n";
        let seen = Seen::of(&format!("{oops}{CONSOLE}{oops}campaign 1.7: alive 1 right\n{oops}"), "1.7");
        assert_eq!(seen.oopses, 1);
        assert!(is_oops("general protection fault, maybe for address 0x1: 0000 [#12] SMP"));
        assert!(!is_oops("CPU: 1 PID: 7 Comm: x [#a] WARNING") && !is_oops("RIP: 0010:[<0>]"));
    }

    #[test]
    fn a_fault_at_random_strikes_between_two_snapshots() {
        let fault = Fault::new(1, super::super::fault::Class::Code, 0, &[]);
        let random = Rests::new(&fault, Moment::AtRandom);
        assert!(random.before + random.after == EVERY && random.later == 1);
        let just_before = Rests::new(&fault, Moment::JustBefore);
        assert_eq!((just_before.before, just_before.sum()), (Duration::ZERO, fault.shows_within));
        assert_eq!(just_before.words(), "0.00 2.00 0 30 0");
        assert!(random.words().ends_with(" 1 30 5"), "{}", random.words());
    }
}
