//! The cost of a switch on both vendors, and of an exit that a process forces beneath a snapshot, in
//! instructions.

use serde::Serialize;

use super::{
    JAILHOUSE,
    counts::{self, Counts},
    exits::{self, FirstWrites},
    intel::{self, Processor},
};
use mercury_lab::{
    error::Result,
    live,
    machine::Machine,
    markdown::{table, thousands},
    spec::Model,
};

/// Heading of the section in docs/benchmarks.md.
pub(super) const HEADING: &str = "## The switch";
/// Key of the figures in docs/benchmarks.json.
pub(super) const KEY: &str = "switch";

/// Memory of the smallest and the largest machine on which switches are counted, in MiB.
const SIZES_MIB: [u32; 2] = [512, 16 * 1024];

/// Upper bounds that the project promises.
pub const ATTACH_AT_MOST: u64 = 520;
pub const DETACH_AT_MOST: u64 = 233;
pub const ROUND_TRIP_AT_MOST: u64 = 92;
pub const INTEL_ATTACH_AT_MOST: u64 = 980;
pub const INTEL_DETACH_AT_MOST: u64 = 369;
pub const INTEL_ROUND_TRIP_AT_MOST: u64 = 112;
pub const CPUID_AT_MOST: u64 = 65;
/// Instructions of the first write to a page beneath a snapshot, beyond those of the write itself.
pub const FIRST_WRITE_AT_MOST: f64 = 2000.0;
/// Difference between two measurements of a write that causes no exit.
pub const WRITE_NOISE: f64 = 20.0;

/// First writes on the last hypervisor that kept predictions and mapped all memory in each exit, by the same
/// test, and its revision.
const BEFORE: (&str, FirstWrites) =
    ("3637af3", FirstWrites { attached: 1031.0, snapshot: 2695.0, again: 1031.0 });

/// All figures of the section.
#[derive(Clone, Debug, Serialize)]
pub struct Switch {
    /// AMD's, by size of memory.
    pub by_memory: Vec<Counts>,
    /// Intel's, by processor.
    pub intel: Vec<Processor>,
    /// First writes to pages beneath a snapshot, on AMD.
    pub first_writes: FirstWrites,
}

/// Measures on machines of both vendors.
///
/// # Errors
/// If a machine fails.
pub fn measure() -> Result<Switch> {
    live::say("Instructions of a switch, on one CPU");
    let by_memory = SIZES_MIB.into_iter().map(count_with).collect::<Result<_>>()?;
    live::say("The same switch on Intel, in Bochs");
    let intel = [Model::Haswell, Model::SkylakeX].into_iter().map(count_on).collect::<Result<_>>()?;
    live::say("Exits that a process forces beneath a snapshot");
    Ok(Switch { by_memory, intel, first_writes: exits::beneath_a_snapshot()? })
}

fn count_with(memory_mib: u32) -> Result<Counts> {
    let counts = counts::with_memory(memory_mib)?;
    let Counts { attach_instructions, detach_instructions, exit_roundtrip_instructions, .. } = counts;
    println!(
        "    {memory_mib} MiB: attach {attach_instructions}, detach {detach_instructions}, an exit and back \
        {exit_roundtrip_instructions}"
    );
    Ok(counts)
}

fn count_on(model: Model) -> Result<Processor> {
    let machine = Machine::boot(intel::machine(model))?;
    let counted = intel::processor(&machine)?;
    machine.shut_down()?;
    Ok(counted)
}

impl Switch {
    /// Returns the figures that docs/benchmarks.json has at its top: the maximum of all sizes of memory.
    #[must_use]
    pub fn top(&self) -> [(&'static str, u64); 3] {
        let most = |of: fn(&Counts) -> u64| self.by_memory.iter().map(of).max().unwrap_or(0);
        [
            ("attach_instructions", most(|counts| counts.attach_instructions)),
            ("detach_instructions", most(|counts| counts.detach_instructions)),
            ("exit_roundtrip_instructions", most(|counts| counts.exit_roundtrip_instructions)),
        ]
    }
}

/// Returns the section of the page.
#[must_use]
pub fn section(switch: &Switch) -> String {
    format!(
        "{HEADING}\n\n\
        `cargo run -p mercury-lab-bench -- bench switch` writes this section alone.\n\n\
        Instructions with interrupts off, on each CPU by itself. The papers' Mercury switched all CPUs \
        together. So\n\
        does Jailhouse, the nearest living peer; its figures are instructions in the same emulator (4 CPUs). \
        A test\n\
        shows that no CPU waits for another: `lab/tests/kernel.rs` holds one CPU with interrupts off while \
        the others\n\
        switch.\n\n{}\n\
        The same on VMX in Bochs, where a tick of the time-stamp counter is an instruction:\n\n{}\n\
        ### An exit beneath a snapshot\n\n\
        A process that writes to pages beneath a snapshot forces an exit for the first write to each. \
        Counted for each\n\
        page on one CPU of AMD's, the process's own instructions included. Runs differ by some eighty. \
        The hypervisor\n\
        of revision {} kept predictions, and mapped all memory in each exit. \
        Since then each such exit fills the return\n\
        predictor, and loads page tables twice. A processor that needs IBPB executes four instructions \
        more.\n\n{}",
        amd_table(&switch.by_memory),
        intel_table(&switch.intel),
        BEFORE.0,
        first_writes_table(&switch.first_writes)
    )
}

fn amd_table(by_memory: &[Counts]) -> String {
    let row = |what: &str, of: fn(&Counts) -> u64, at_most: u64, paper: &str, peer: String| {
        let mut row = vec![what.to_owned()];
        row.extend(by_memory.iter().map(|counts| thousands(of(counts))));
        row.extend([at_most.to_string(), paper.to_owned(), peer]);
        row
    };
    let enable = thousands(JAILHOUSE.jailhouse_enable_instructions);
    let disable = thousands(JAILHOUSE.jailhouse_disable_instructions);
    let rows = [
        row("attach", |counts| counts.attach_instructions, ATTACH_AT_MOST, "220 µs", enable),
        row("detach", |counts| counts.detach_instructions, DETACH_AT_MOST, "60 µs", disable),
        row(
            "exit and back",
            |counts| counts.exit_roundtrip_instructions,
            ROUND_TRIP_AT_MOST,
            "",
            String::new(),
        ),
    ];
    let sizes: Vec<String> =
        by_memory.iter().map(|counts| format!("{} MiB", thousands(counts.memory_mib.into()))).collect();
    let mut header = vec!["instructions"];
    header.extend(sizes.iter().map(String::as_str));
    header.extend(["at most", "JCST 2012", "Jailhouse"]);
    table(&header, &rows)
}

fn intel_table(processors: &[Processor]) -> String {
    let row = |what: &str, of: fn(&Processor) -> u64, at_most: u64| {
        let mut row = vec![what.to_owned()];
        row.extend(processors.iter().map(|processor| thousands(of(processor))));
        row.push(thousands(at_most));
        row
    };
    let rows = [
        row("attach", |one| one.attach_instructions, INTEL_ATTACH_AT_MOST),
        row("detach", |one| one.detach_instructions, INTEL_DETACH_AT_MOST),
        row("hypercall and back", |one| one.exit_roundtrip_instructions, INTEL_ROUND_TRIP_AT_MOST),
        row("CPUID, by an exit", |one| one.cpuid_exit_instructions, CPUID_AT_MOST),
    ];
    let mut header = vec!["instructions"];
    header.extend(processors.iter().map(|processor| processor.name.as_str()));
    header.push("at most");
    table(&header, &rows)
}

fn first_writes_table(now: &FirstWrites) -> String {
    let row = |what: String, writes: &FirstWrites| {
        let costs = [writes.attached, writes.snapshot, writes.snapshot - writes.attached, writes.again];
        let cells = costs.map(|cost| thousands(cost.round() as u64));
        [what].into_iter().chain(cells).collect::<Vec<_>>()
    };
    let rows = [row(format!("revision {}", BEFORE.0), &BEFORE.1), row("now".to_owned(), now)];
    let header =
        ["instructions a page", "attached", "first write beneath a snapshot", "more", "written again"];
    table(&header, &rows)
}

/// Returns each promise, and the words for a broken one.
#[must_use]
pub fn promises(switch: &Switch) -> Vec<(bool, &'static str)> {
    let [attach, detach, round_trip] = switch.top().map(|(_, most)| most);
    let flat = switch.by_memory.windows(2).all(|pair| {
        (pair[0].attach_instructions, pair[0].detach_instructions)
            == (pair[1].attach_instructions, pair[1].detach_instructions)
    });
    let on_intel =
        |of: fn(&Processor) -> u64, at_most: u64| switch.intel.iter().all(|one| of(one) <= at_most);
    let writes = &switch.first_writes;
    vec![
        (attach <= ATTACH_AT_MOST, "attach is longer than promised"),
        (detach <= DETACH_AT_MOST, "detach is longer than promised"),
        (round_trip <= ROUND_TRIP_AT_MOST, "an exit is longer than promised"),
        (flat, "the length of a switch depends on the size of memory"),
        (
            on_intel(|one| one.attach_instructions, INTEL_ATTACH_AT_MOST)
                && on_intel(|one| one.detach_instructions, INTEL_DETACH_AT_MOST),
            "a switch on Intel is longer than promised",
        ),
        (
            on_intel(|one| one.exit_roundtrip_instructions, INTEL_ROUND_TRIP_AT_MOST)
                && on_intel(|one| one.cpuid_exit_instructions, CPUID_AT_MOST),
            "an exit on Intel is longer than promised",
        ),
        (
            writes.snapshot <= writes.attached + FIRST_WRITE_AT_MOST
                && writes.again <= writes.attached + WRITE_NOISE,
            "a write beneath a snapshot is longer than promised",
        ),
    ]
}

/// Returns figures that keep all promises.
#[cfg(test)]
pub(super) fn kept_promises() -> Switch {
    use super::Memory;
    let memory = Memory { fixed_bytes: 448 << 10, per_cpu_bytes: 40 << 10, possible_cpus: 1 };
    let counts = |memory_mib| Counts {
        memory_mib,
        attach_instructions: 517,
        attach_instructions_min: 517,
        detach_instructions: 219,
        detach_instructions_min: 219,
        exit_roundtrip_instructions: 88,
        memory,
    };
    let processor = Processor {
        name: "Core".into(),
        attach_instructions: 968,
        detach_instructions: 365,
        exit_roundtrip_instructions: 108,
        cpuid_exit_instructions: 63,
    };
    Switch {
        by_memory: vec![counts(512), counts(16_384)],
        intel: vec![processor],
        first_writes: FirstWrites { attached: 1000.0, snapshot: 2754.4, again: 1001.0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_has_both_vendors_and_first_writes() {
        let section = section(&kept_promises());
        let squeezed = section.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "| attach | 517 | 517 | 520 | 220 µs | 22,900,000 |",
            "| attach | 968 | 980 |",
            "| CPUID, by an exit | 63 | 65 |",
            "| revision 3637af3 | 1,031 | 2,695 | 1,664 | 1,031 |",
            "| now | 1,000 | 2,754 | 1,754 | 1,001 |",
        ] {
            assert!(squeezed.contains(part), "{part:?} is not in\n{section}");
        }
    }

    #[test]
    fn each_promise_can_be_broken() {
        let broken = |change: fn(&mut Switch)| {
            let mut switch = kept_promises();
            change(&mut switch);
            promises(&switch).into_iter().filter(|(kept, _)| !kept).map(|(_, what)| what).collect::<Vec<_>>()
        };
        assert_eq!(broken(|_| ()), Vec::<&str>::new());
        assert_eq!(
            broken(|switch| switch.by_memory[0].attach_instructions = 600),
            ["attach is longer than promised", "the length of a switch depends on the size of memory"]
        );
        assert_eq!(
            broken(|switch| switch.intel[0].cpuid_exit_instructions = 66),
            ["an exit on Intel is longer than promised"]
        );
        assert_eq!(
            broken(|switch| switch.first_writes.snapshot = 3200.0),
            ["a write beneath a snapshot is longer than promised"]
        );
    }
}
