//! `mercury status`: the mode of each CPU, as the CPU itself reports it, and the hypervisor's
//! counters.

use crate::{
    driver::Driver,
    error::Result,
    module,
    output::{Hex, Render, Text, Tone, bytes, duration, thousands, ticks_to_us},
    rollback::Rollback,
    svm,
    sysroot::Sysroot,
};
use mercury_abi::{
    code::Code,
    ioctl::{
        CpuStatus, MERCURY_FEATURE_FAULT_INJECTION, MERCURY_FEATURE_MONITOR, MERCURY_MODE_ATTACHED,
        MERCURY_MODE_NATIVE, MERCURY_MODE_OFFLINE, MERCURY_STATE_ATTACHED, MERCURY_STATE_CRASHED,
        MERCURY_STATE_LOADED, MERCURY_STATE_UNLOADED, SystemInfo,
    },
    shared::{CrashRecord, ExitReason, SHARED_MAGIC, SharedCpu},
    snapshot::SnapshotStatus,
};
use serde::Serialize;
use std::{collections::BTreeMap, fmt};

/// CPUs at most with a column each; more are summed up.
const COLUMNS: usize = 8;

/// Name of the exits that Mercury's driver causes itself.
const HYPERCALL: &str = "hypercall";

const REGISTERS: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
    "r15",
];

/// The state that `mercury status` shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    /// State: `no-driver`, `unloaded`, `loaded`, `attached`, `crashed`, or `orphaned` (attached
    /// without a driver).
    pub state: &'static str,
    /// Evidence for a hypervisor that a removed driver left beneath.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspicion: Option<&'static str>,
    /// True if Mercury's monitor runs this machine as a guest of another one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub guest: bool,
    /// Version of the hypervisor, empty without a driver.
    pub version: String,
    /// TSC frequency in kHz.
    pub tsc_khz: u64,
    /// Process that controls Mercury.
    pub controller_pid: Option<u32>,
    /// Number of possible CPUs.
    pub possible_cpus: u32,
    /// Number of CPUs that should be attached.
    pub wanted_cpus: u32,
    /// Memory of the pre-cached hypervisor.
    pub memory: Memory,
    /// Features of the build: `fault-injection` in the lab's.
    pub features: Vec<&'static str>,
    /// Snapshot of memory, if there is or was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Snapshot>,
    /// Last rollback of this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollback: Option<Rollback>,
    /// Memory of the life that ended at the last rollback, while it is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postmortem: Option<Postmortem>,
    /// One entry per possible CPU.
    pub cpus: Vec<Cpu>,
}

/// The life that ended at the last rollback, which `mercury postmortem` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Postmortem {
    /// Bytes of the pool that hold its memory.
    pub held_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// State: `kept` (a rollback is possible), `in-use` (by a checkpoint), `lost`.
    pub state: &'static str,
    /// Reason why the snapshot was lost.
    pub lost_because: Option<&'static str>,
    /// Pages that were copied so far.
    pub copied_pages: u64,
    /// Bytes left for copies.
    pub free_bytes: u64,
}

impl Snapshot {
    fn new(status: &SnapshotStatus) -> Option<Self> {
        let lost_because =
            Code::from_number(status.invalid_because).filter(|code| *code != Code::Ok).map(Code::name);
        let state = match (lost_because, status.live, status.kept) {
            (Some(_), ..) => "lost",
            (None, 0, _) => return None,
            (None, _, 0) => "in-use",
            (None, ..) => "kept",
        };
        let free_bytes = status.free_pages * 4096;
        Some(Self { state, lost_because, copied_pages: status.copied, free_bytes })
    }

    fn line(&self) -> String {
        match self.lost_because {
            Some(why) => format!("the snapshot of memory was lost: {why} (`mercury explain {why}`)"),
            None if self.state == "in-use" => "a snapshot of memory is being taken".into(),
            None => format!(
                "a snapshot of memory is kept: {} pages copied, room for {} more",
                thousands(self.copied_pages),
                bytes(self.free_bytes)
            ),
        }
    }
}

/// Memory of the hypervisor in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Part that is independent of the number of CPUs.
    pub fixed_bytes: u64,
    /// Part for each possible CPU.
    pub per_cpu_bytes: u64,
    /// Sum of both parts.
    pub total_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cpu {
    /// Number of the CPU in Linux.
    pub cpu: u32,
    /// Mode: `offline`, `native` or `attached`, asked of the CPU just now.
    pub mode: &'static str,
    /// True if the CPU should be attached.
    pub wanted: bool,
    /// Reason why it last left the hypervisor without a detach.
    pub left_because: Option<&'static str>,
    /// Attaches since load.
    pub attaches: u64,
    /// Detaches since load.
    pub detaches: u64,
    /// TSC ticks with interrupts off in the last attach.
    pub attach_ticks: u64,
    /// Microseconds with interrupts off in the last attach.
    pub attach_us: f64,
    /// TSC ticks with interrupts off in the last detach.
    pub detach_ticks: u64,
    /// Microseconds with interrupts off in the last detach.
    pub detach_us: f64,
    /// Exits since load, of all reasons.
    pub exits_total: u64,
    /// Exits since load by reason, without reasons that never occurred.
    pub exits: BTreeMap<&'static str, u64>,
    /// TSC ticks in exits since load.
    pub exit_ticks: u64,
    pub crash: Option<Crash>,
}

/// The record of a crash of the hypervisor on a CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Crash {
    /// Code of the crash.
    pub code: &'static str,
    /// Panic message or name of the fault point.
    pub message: String,
    /// Name of the exception, if it was one.
    pub exception: Option<String>,
    /// Error code of the exception.
    pub error_code: Hex,
    /// TSC at the crash.
    pub tsc: u64,
    /// Instruction pointer of the hypervisor, relative to its image.
    pub host_rip_offset: Hex,
    /// Stack pointer of the hypervisor.
    pub host_rsp: Hex,
    /// CR2 of the hypervisor.
    pub host_cr2: Hex,
    /// Name of the last exit.
    pub exit: String,
    /// Code of the last exit.
    pub exit_code: Hex,
    /// First qualification of the last exit.
    pub exit_info1: Hex,
    /// Second qualification of the last exit.
    pub exit_info2: Hex,
    /// Event in delivery at the last exit.
    pub exit_event: Hex,
    /// Registers of the system.
    pub guest: BTreeMap<&'static str, Hex>,
}

impl Status {
    /// Asks the driver for the status.
    pub fn collect(driver: &dyn Driver) -> Result<Self> {
        let system = driver.system()?;
        let cpus = driver.status()?;
        if system.state != MERCURY_STATE_UNLOADED {
            return Ok(Self::new(&system, &cpus, &driver.shared()?));
        }
        if !cpus.iter().any(|cpu| cpu.mode == MERCURY_MODE_ATTACHED) {
            return Ok(Self::new(&system, &[], &[]));
        }
        Ok(Self { state: "orphaned", ..Self::new(&system, &cpus, &[]) })
    }

    /// Returns the status of a machine without the driver.
    #[must_use]
    pub fn without_driver(sysroot: &Sysroot) -> Self {
        let suspicion = module::suspect_hypervisor(sysroot);
        Self { state: "no-driver", suspicion, ..Self::new(&SystemInfo::default(), &[], &[]) }
    }

    /// Combines the facts of the driver and of the hypervisor.
    #[must_use]
    pub fn new(system: &SystemInfo, cpus: &[CpuStatus], shared: &[SharedCpu]) -> Self {
        let cpu = |status: &CpuStatus| cpu(status, shared.get(status.cpu as usize), system.tsc_khz);
        Self {
            state: state_name(system.state),
            suspicion: None,
            guest: false,
            version: nul_padded(&system.version),
            tsc_khz: system.tsc_khz,
            controller_pid: (system.controller_pid != 0).then_some(system.controller_pid),
            possible_cpus: system.possible_cpus,
            wanted_cpus: system.wanted_cpus,
            memory: Memory {
                fixed_bytes: system.memory_fixed,
                per_cpu_bytes: system.memory_per_cpu,
                total_bytes: system.memory_fixed + system.memory_per_cpu * u64::from(system.possible_cpus),
            },
            features: features(system.features),
            snapshot: Snapshot::new(&system.snapshot),
            rollback: (system.snapshot.rollback.count != 0)
                .then(|| Rollback::new(&system.snapshot.rollback, String::new(), system.tsc_khz)),
            postmortem: (system.snapshot.dead != 0)
                .then(|| Postmortem { held_bytes: system.snapshot.dead_pages * 4096 }),
            cpus: cpus.iter().map(cpu).collect(),
        }
    }

    /// Returns the exits of all CPUs since load.
    #[must_use]
    pub fn exits_total(&self) -> u64 {
        self.cpus.iter().map(|cpu| cpu.exits_total).sum()
    }

    /// Returns the hypercalls of Mercury's driver on all CPUs since load.
    #[must_use]
    pub fn hypercalls(&self) -> u64 {
        self.cpus.iter().filter_map(|cpu| cpu.exits.get(HYPERCALL)).sum()
    }

    /// Returns the number of CPUs in a mode.
    #[must_use]
    pub fn in_mode(&self, mode: &str) -> usize {
        self.cpus.iter().filter(|cpu| cpu.mode == mode).count()
    }
}

fn state_name(state: u32) -> &'static str {
    match state {
        MERCURY_STATE_UNLOADED => "unloaded",
        MERCURY_STATE_LOADED => "loaded",
        MERCURY_STATE_ATTACHED => "attached",
        MERCURY_STATE_CRASHED => "crashed",
        _ => "unknown",
    }
}

fn mode_name(mode: u32) -> &'static str {
    match mode {
        MERCURY_MODE_OFFLINE => "offline",
        MERCURY_MODE_NATIVE => "native",
        MERCURY_MODE_ATTACHED => "attached",
        _ => "unknown",
    }
}

fn features(bits: u64) -> Vec<&'static str> {
    let named = [(MERCURY_FEATURE_FAULT_INJECTION, "fault-injection"), (MERCURY_FEATURE_MONITOR, "monitor")];
    named.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| name).collect()
}

/// Converts NUL-padded ASCII to text.
#[must_use]
pub fn nul_padded(text: &[u8]) -> String {
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    String::from_utf8_lossy(text.get(..end).unwrap_or_default()).into_owned()
}

fn cpu(status: &CpuStatus, shared: Option<&SharedCpu>, tsc_khz: u64) -> Cpu {
    let shared = shared.filter(|shared| shared.magic == SHARED_MAGIC);
    let exits = shared.map(exits_by_reason).unwrap_or_default();
    let left = Code::from_number(status.left_because).filter(|code| *code != Code::Ok);
    Cpu {
        cpu: status.cpu,
        mode: mode_name(status.mode),
        wanted: status.wanted != 0,
        left_because: left.map(Code::name),
        attaches: status.attaches,
        detaches: status.detaches,
        attach_ticks: status.attach_ticks,
        attach_us: ticks_to_us(status.attach_ticks, tsc_khz),
        detach_ticks: status.detach_ticks,
        detach_us: ticks_to_us(status.detach_ticks, tsc_khz),
        exits_total: exits.values().sum(),
        exits,
        exit_ticks: shared.map_or(0, |shared| shared.exit_ticks),
        crash: shared.and_then(|shared| crash(&shared.crash)),
    }
}

fn exits_by_reason(shared: &SharedCpu) -> BTreeMap<&'static str, u64> {
    let counts = ExitReason::NAMES.iter().zip(&shared.exits);
    counts.map(|((_, name), count)| (*name, *count)).filter(|(_, count)| *count != 0).collect()
}

fn crash(record: &CrashRecord) -> Option<Crash> {
    let exception = match record.vector {
        u32::MAX => None,
        vector => Some(svm::vector_name(vector)),
    };
    (record.code != 0).then(|| Crash {
        code: Code::from_number(record.code).map_or("unknown", Code::name),
        message: nul_padded(&record.message),
        exception,
        error_code: Hex(record.error_code),
        tsc: record.tsc,
        host_rip_offset: Hex(record.host_rip_offset),
        host_rsp: Hex(record.host_rsp_virt),
        host_cr2: Hex(record.host_cr2),
        exit: svm::exit_name(record.exit_code),
        exit_code: Hex(record.exit_code),
        exit_info1: Hex(record.exit_info1),
        exit_info2: Hex(record.exit_info2),
        exit_event: Hex(record.exit_event),
        guest: guest_registers(record),
    })
}

fn guest_registers(record: &CrashRecord) -> BTreeMap<&'static str, Hex> {
    let general = REGISTERS.iter().copied().zip(record.guest_registers);
    let special = [
        ("rip", record.guest_rip),
        ("rflags", record.guest_rflags),
        ("cr0", record.guest_cr0),
        ("cr2", record.guest_cr2),
        ("cr3", record.guest_cr3),
        ("cr4", record.guest_cr4),
        ("cs", record.guest_cs_ss & 0xffff),
        ("ss", record.guest_cs_ss >> 16 & 0xffff),
    ];
    general.chain(special).map(|(name, value)| (name, Hex(value))).collect()
}

impl Render for Status {
    fn render(&self, to: &mut Text) {
        to.line(self.headline(to));
        if self.guest {
            to.line("Mercury's monitor runs this machine as a guest of another one");
        }
        if let Some(suspicion) = self.suspicion {
            to.line(to.tone(Tone::Doubtful, suspicion));
            to.line("`mercury doctor` asks the CPUs if a hypervisor is beneath them");
        }
        if self.state == "no-driver" {
            return;
        }
        to.line(self.memory_line());
        if let Some(pid) = self.controller_pid {
            to.line(format!("controlled by process {pid}"));
        }
        if let Some(snapshot) = &self.snapshot {
            let tone = if snapshot.state == "lost" { Tone::Doubtful } else { Tone::Good };
            to.line(to.tone(tone, &snapshot.line()));
        }
        if let Some(rollback) = &self.rollback {
            let count = rollback.count;
            to.line(format!("put back to a snapshot (so far: {count}); last by {}", rollback.text()));
        }
        if let Some(Postmortem { held_bytes }) = self.postmortem {
            let held = bytes(held_bytes);
            to.line(format!("{held} hold the memory of the life that ended: `mercury postmortem` shows it"));
        }
        if !self.cpus.is_empty() {
            to.line("");
            to.table(&self.cpu_rows());
        }
        self.render_departures(to);
        self.render_exits(to);
        self.render_crashes(to);
    }
}

impl Status {
    fn headline(&self, to: &Text) -> String {
        let online = self.cpus.len() - self.in_mode("offline");
        let attached = self.in_mode("attached");
        let state = match self.state {
            "no-driver" if self.suspicion.is_some() => "not loaded".into(),
            // A guest's CPUs are the host's monitor's, and not native.
            "no-driver" if self.guest => "not loaded".into(),
            "unloaded" if self.guest => "driver loaded, hypervisor not".into(),
            "no-driver" => "not loaded: every CPU is native".into(),
            "unloaded" => "driver loaded, hypervisor not: every CPU is native".into(),
            "loaded" => to.tone(Tone::Good, "loaded, every CPU native"),
            "attached" => to.tone(Tone::Good, &format!("attached, {attached} of {online} online CPUs")),
            "crashed" => to.tone(Tone::Bad, "crashed and taken out; the system runs on natively"),
            "orphaned" => to.tone(
                Tone::Bad,
                &format!(
                    "{attached} of {online} online CPUs are above a hypervisor whose driver is gone: reboot \
                     [orphaned-hypervisor]"
                ),
            ),
            other => other.to_string(),
        };
        format!(
            "Mercury {}{state}",
            if self.version.is_empty() { String::new() } else { self.version.clone() + ": " }
        )
    }

    fn memory_line(&self) -> String {
        format!(
            "memory {}: {} and {} for each of {} possible CPUs",
            bytes(self.memory.total_bytes),
            bytes(self.memory.fixed_bytes),
            bytes(self.memory.per_cpu_bytes),
            self.possible_cpus
        )
    }

    fn cpu_rows(&self) -> Vec<Vec<String>> {
        let heading =
            ["CPU", "mode", "attaches", "detaches", "last attach", "last detach", "exits", "in exits"];
        let mut rows = vec![heading.map(String::from).to_vec()];
        rows.extend(self.cpus.iter().map(|cpu| self.cpu_row(cpu)));
        rows
    }

    fn cpu_row(&self, cpu: &Cpu) -> Vec<String> {
        let time = |ticks, us| if ticks == 0 { "–".to_string() } else { duration(us) };
        vec![
            cpu.cpu.to_string(),
            cpu.mode.to_string(),
            thousands(cpu.attaches),
            thousands(cpu.detaches),
            time(cpu.attach_ticks, cpu.attach_us),
            time(cpu.detach_ticks, cpu.detach_us),
            thousands(cpu.exits_total),
            duration(ticks_to_us(cpu.exit_ticks, self.tsc_khz)),
        ]
    }

    fn render_departures(&self, to: &mut Text) {
        let gone = |cpu: &&Cpu| cpu.wanted && cpu.mode == "native";
        for cpu in self.cpus.iter().filter(gone) {
            let why = cpu.left_because.unwrap_or("cpu-reset");
            let text =
                format!("CPU {} should be attached but is native: {why} (`mercury explain {why}`)", cpu.cpu);
            to.line("");
            to.line(to.tone(Tone::Doubtful, &text));
        }
    }

    fn render_exits(&self, to: &mut Text) {
        let rows = self.exit_rows();
        if rows.len() > 1 {
            to.line("");
            to.table(&rows);
        }
    }

    /// Makes a row per reason that occurred, with a column per CPU if they fit.
    fn exit_rows(&self) -> Vec<Vec<String>> {
        let columns: &[Cpu] = if self.cpus.len() <= COLUMNS { &self.cpus } else { &[] };
        let mut heading = vec!["exits by reason".to_string(), "all".to_string()];
        heading.extend(columns.iter().map(|cpu| format!("CPU {}", cpu.cpu)));
        let count = |cpu: &Cpu, name: &str| cpu.exits.get(name).copied().unwrap_or(0);
        let row = |name: &'static str| {
            let all: u64 = self.cpus.iter().map(|cpu| count(cpu, name)).sum();
            let each = columns.iter().map(|cpu| thousands(count(cpu, name)));
            let cells = [name.to_string(), thousands(all)].into_iter().chain(each).collect();
            (all != 0).then_some(cells)
        };
        let rows = ExitReason::NAMES.iter().filter_map(|(_, name)| row(name));
        std::iter::once(heading).chain(rows).collect()
    }

    fn render_crashes(&self, to: &mut Text) {
        for cpu in &self.cpus {
            if let Some(crash) = &cpu.crash {
                to.line("");
                crash.render_on(cpu.cpu, to);
            }
        }
    }
}

impl Crash {
    fn render_on(&self, cpu: u32, to: &mut Text) {
        let exception =
            self.exception.as_ref().map(|name| format!(": {name} (error code {})", hex(self.error_code)));
        let title = format!("crash on CPU {cpu}: {}{}", self.code, exception.unwrap_or_default());
        to.line(to.tone(Tone::Bad, &title));
        if !self.message.is_empty() {
            to.line(format!("  {}", self.message));
        }
        to.line(format!(
            "  hypervisor: rip image+{}, rsp {}, cr2 {}",
            hex(self.host_rip_offset),
            hex(self.host_rsp),
            hex(self.host_cr2)
        ));
        to.line(format!(
            "  last exit: {} ({}), info {} {}, event {}",
            self.exit,
            hex(self.exit_code),
            hex(self.exit_info1),
            hex(self.exit_info2),
            hex(self.exit_event)
        ));
        let order = ["rip", "rflags", "cs", "ss", "cr0", "cr2", "cr3", "cr4"].iter().chain(&REGISTERS);
        let cells: Vec<String> = order.map(|name| self.register(name)).collect();
        for line in cells.chunks(4) {
            to.line(format!("  {}", line.join("  ")));
        }
    }

    fn register(&self, name: &str) -> String {
        format!("{name:>6} {:016x}", self.guest.get(name).map_or(0, |value| value.0))
    }
}

fn hex(value: Hex) -> String {
    format!("{:#x}", value.0)
}

/// The rate of exits between two readings, per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Exits that the system caused.
    pub of_system: f64,
    /// Hypercalls of Mercury's driver: each reading of the status asks every attached CPU.
    pub of_mercury: f64,
}

impl Rate {
    /// Computes the rate between two readings that were made so many seconds apart.
    #[must_use]
    pub fn between(before: &Status, after: &Status, seconds: f64) -> Self {
        let per_second = |exits: u64| if seconds > 0.0 { exits as f64 / seconds } else { 0.0 };
        let all = after.exits_total().saturating_sub(before.exits_total());
        let own = after.hypercalls().saturating_sub(before.hypercalls());
        Self { of_system: per_second(all.saturating_sub(own)), of_mercury: per_second(own) }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of_system, of_mercury } = self;
        write!(
            f,
            "{of_system:.1} exits a second, and {of_mercury:.1} hypercalls by which Mercury itself asks the \
             CPUs"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeDriver, shared_cpu, system};
    use crate::output::json;

    fn status(mode: u32) -> Status {
        let mut one = shared_cpu(1);
        one.exits[ExitReason::Hypercall as usize] = 1200;
        one.exits[ExitReason::NestedFill as usize] = 2;
        one.exit_ticks = 4_000_000;
        let cpu =
            |cpu, mode| CpuStatus { cpu, mode, attach_ticks: 9000, attaches: 1, ..CpuStatus::default() };
        let info = SystemInfo { state: MERCURY_STATE_ATTACHED, wanted_cpus: 2, ..system(2) };
        Status::new(&info, &[cpu(0, MERCURY_MODE_ATTACHED), cpu(1, mode)], &[shared_cpu(0), one])
    }

    fn rendered(status: &Status) -> String {
        let mut text = Text::new(false);
        status.render(&mut text);
        text.finish()
    }

    #[test]
    fn attached() {
        insta::assert_snapshot!(rendered(&status(MERCURY_MODE_ATTACHED)));
    }

    #[test]
    fn a_life_that_ended_is_named_while_it_is_kept() {
        let mut system = SystemInfo { state: MERCURY_STATE_ATTACHED, ..SystemInfo::default() };
        assert_eq!(Status::new(&system, &[], &[]).postmortem, None);
        (system.snapshot.dead, system.snapshot.dead_pages) = (1, 512);
        let status = Status::new(&system, &[], &[]);
        assert_eq!(status.postmortem, Some(Postmortem { held_bytes: 2 << 20 }));
        let text = rendered(&status);
        assert!(text.contains("MiB hold the memory of the life that ended: `mercury postmortem`"), "{text}");
    }

    #[test]
    fn fallen_back_to_native() {
        let mut status = status(MERCURY_MODE_NATIVE);
        status.cpus[1].wanted = true;
        status.cpus[1].left_because = Some("microcode-update");
        assert!(rendered(&status).contains("CPU 1 should be attached but is native: microcode-update"));
    }

    #[test]
    fn crashed() {
        let mut shared = shared_cpu(0);
        shared.crash.code = Code::HostException as u32;
        shared.crash.vector = 14;
        shared.crash.exit_code = 0x400;
        shared.crash.host_cr2 = 0xdead_0000;
        shared.crash.guest_rip = 0xffff_ffff_8123_4567;
        shared.crash.message[..4].copy_from_slice(b"test");
        let cpu = CpuStatus { mode: MERCURY_MODE_NATIVE, ..CpuStatus::default() };
        let info = SystemInfo { state: MERCURY_STATE_CRASHED, ..system(1) };
        insta::assert_snapshot!(rendered(&Status::new(&info, &[cpu], &[shared])));
    }

    #[test]
    fn not_loaded() {
        assert_eq!(
            rendered(&Status::without_driver(&Sysroot::at("/nowhere"))),
            "Mercury not loaded: every CPU is native\n"
        );
    }

    #[test]
    fn a_guest_of_mercury_s_monitor_is_no_native_machine() {
        let there = Status { guest: true, ..Status::without_driver(&Sysroot::at("/nowhere")) };
        let unloaded = SystemInfo { state: MERCURY_STATE_UNLOADED, ..SystemInfo::default() };
        let loaded = Status { guest: true, ..Status::new(&unloaded, &[], &[]) };
        for status in [there, loaded] {
            let text = rendered(&status);
            assert!(text.contains("monitor runs this machine as a guest"), "{text}");
            assert!(
                !text.contains("native") && json("status", &status).contains("\"guest\": true"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_hypervisor_without_a_driver_is_not_bare_hardware() {
        let root = tempfile::tempdir().expect("temporary directory");
        std::fs::create_dir_all(root.path().join("proc/sys/kernel")).expect("directory");
        std::fs::write(root.path().join("proc/sys/kernel/tainted"), "4104\n").expect("file");
        let text = rendered(&Status::without_driver(&Sysroot::at(root.path())));
        assert!(text.contains("removed by force") && text.contains("mercury doctor"), "{text}");
        assert!(!text.contains("native"), "{text}");
        // Another driver, which has loaded nothing, asks the CPUs.
        let driver = FakeDriver::new(2);
        driver.attached.borrow_mut().fill(true);
        let status = Status::collect(&driver).expect("status");
        assert_eq!((status.state, status.in_mode("attached")), ("orphaned", 2));
        let text = rendered(&status);
        assert!(text.contains("2 of 2 online CPUs are above a hypervisor whose driver is gone"), "{text}");
    }

    #[test]
    fn as_json() {
        insta::assert_snapshot!(json("status", &status(MERCURY_MODE_ATTACHED)));
    }

    #[test]
    fn rates() {
        let before = status(MERCURY_MODE_ATTACHED);
        let mut after = before.clone();
        after.cpus[0].exits_total += 50;
        assert_eq!(Rate::between(&before, &after, 2.0), Rate { of_system: 25.0, of_mercury: 0.0 });
        assert_eq!(Rate::between(&after, &before, 2.0), Rate { of_system: 0.0, of_mercury: 0.0 });
        // Asking the CPUs is no work of the system.
        after.cpus[1].exits_total += 4;
        *after.cpus[1].exits.get_mut(HYPERCALL).expect("hypercalls") += 4;
        assert_eq!(Rate::between(&before, &after, 2.0), Rate { of_system: 25.0, of_mercury: 2.0 });
    }
}
