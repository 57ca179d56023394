//! The cost of a switch, in counts that do not depend on the clock. An attached machine that is
//! left alone costs nothing.

use std::time::Duration;

use mercury_lab::{Kernel, Machine, Model, Platform, Result, Spec, Vendor};
use mercury_lab_bench::{
    checkpoint::{
        pause::{self, Pause},
        slope,
    },
    counts::{self, Counts, Memory},
    exits, intel, kvm, switch,
};

/// With 40 physical address bits, which the lab's machines have.
const FIXED_AT_MOST: u64 = 640 << 10;
const PER_CPU_AT_MOST: u64 = 64 << 10;

fn check_memory(memory: Memory) {
    assert!(memory.fixed_bytes > 0 && memory.fixed_bytes <= FIXED_AT_MOST, "{memory:?}");
    assert!(memory.per_cpu_bytes > 0 && memory.per_cpu_bytes <= PER_CPU_AT_MOST, "{memory:?}");
}

#[test]
fn switches_are_short_and_the_same_on_small_and_large_machines() -> Result<()> {
    let (small, large) = (counts::with_memory(512)?, counts::with_memory(16 * 1024)?);
    for counts in [&small, &large] {
        println!("{counts:?}");
        assert!(counts.attach_instructions <= switch::ATTACH_AT_MOST, "{counts:?}");
        assert!(counts.detach_instructions <= switch::DETACH_AT_MOST, "{counts:?}");
        assert!(counts.exit_roundtrip_instructions <= switch::ROUND_TRIP_AT_MOST, "{counts:?}");
        check_memory(counts.memory);
    }
    // The sizes themselves and the tables that cover them may differ; nothing else may.
    let comparable = |counts: &Counts| Counts { memory_mib: 0, memory: small.memory, ..counts.clone() };
    assert_eq!(comparable(&small), comparable(&large));
    Ok(())
}

/// Bounds the hypervisor's part of a pause at each size of memory, and checks that the phases make
/// up the whole pause. The watch on DMA was once set up in the pause without being counted.
#[test]
fn snapshots_are_short_and_the_same_on_small_and_large_machines() -> Result<()> {
    let pauses = [pause::with_memory(512, 3)?, pause::with_memory(4096, 3)?];
    for pause in &pauses {
        println!("{pause:?}");
        assert!(pause.snapshot_instructions <= 5000, "{pause:?}");
        assert!(pause.persistent_pages > 0 && pause.phases.copy_persistent > 0, "{pause:?}");
        let phases = pause.totals.iter().min().copied().unwrap_or(0);
        assert!(pause.unexplained_ns() <= phases / 4, "{pause:?}");
    }
    let costs = |pause: &Pause| (pause.snapshot_instructions_min, pause.snapshot_instructions);
    assert_eq!(costs(&pauses[0]), costs(&pauses[1]));
    Ok(())
}

/// Compares the kernel's memory after each checkpoint with its memory after the same work without
/// one, under all names of /proc/meminfo.
#[test]
#[ignore = "long"]
fn checkpoints_leave_no_memory_behind() -> Result<()> {
    const ROUNDS: usize = 30;
    /// The largest noise of a slope, in KiB, at which a leak is not overlooked.
    const SURE: f64 = 64.0;
    let all = slope::measure(ROUNDS)?;
    for held in &all {
        println!("{:>12}: {:+.1} KiB more each, noise {:.1}; {held:?}", held.name, held.more(), held.noise());
    }
    assert!(all.iter().any(|held| held.name == "MemFree"), "{all:?}");
    for held in &all {
        assert!(held.noise() < SURE, "not to be told: {held:?}");
        assert!(held.more() <= held.noise().max(4.0), "{held:?}");
    }
    Ok(())
}

/// Bounds the cost of exits that a process can force.
#[test]
#[ignore = "long"]
fn exits_beneath_a_snapshot_are_short() -> Result<()> {
    let writes = exits::beneath_a_snapshot()?;
    println!("{writes:?}");
    assert!(writes.again <= writes.attached + switch::WRITE_NOISE, "{writes:?}");
    assert!(writes.snapshot <= writes.attached + switch::FIRST_WRITE_AT_MOST, "{writes:?}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn switches_on_intel_are_short() -> Result<()> {
    for model in [Model::Haswell, Model::SkylakeX] {
        let machine = Machine::boot(intel::machine(model))?;
        let counts = intel::processor(&machine)?;
        assert!(counts.attach_instructions <= switch::INTEL_ATTACH_AT_MOST, "{counts:?}");
        assert!(counts.detach_instructions <= switch::INTEL_DETACH_AT_MOST, "{counts:?}");
        assert!(counts.exit_roundtrip_instructions <= switch::INTEL_ROUND_TRIP_AT_MOST, "{counts:?}");
        assert!(counts.cpuid_exit_instructions <= switch::CPUID_AT_MOST, "{counts:?}");
        machine.check_next_attach()?;
    }
    Ok(())
}

/// Counts no exit but the expected ones. On Intel's processors CPUID always exits, and each start
/// of a program executes some.
#[test]
#[ignore = "long"]
fn a_database_at_work_causes_no_exits() -> Result<()> {
    let machine = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(4).memory_mib(1536))?;
    machine.start_postgres()?;
    machine.mercury("load")?;
    check_memory(Memory::of(&machine)?);
    let exits = exits::under_postgres(&machine, Duration::from_secs(15))?;
    println!("{exits:?}");
    assert!(exits.transactions > 0, "{exits:?}");
    let forced = match Platform::chosen()?.vendor() {
        Vendor::Amd => 0,
        Vendor::Intel => exits.by_reason.get("cpuid").copied().unwrap_or(0),
    };
    let others = exits.by_reason.values().sum::<u64>() - forced;
    assert_eq!(others, exits.of_the_question, "{exits:?}");
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn exits_of_guests_are_short() -> Result<()> {
    if Platform::chosen()? != Platform::Qemu {
        return Ok(());
    }
    let exits = kvm::exits(5000, 2)?;
    println!("{exits:?}");
    assert!(exits.attached - exits.native <= kvm::ADDED_AT_MOST, "{exits:?}");
    assert!(exits.world_switches <= kvm::SWITCHES_AT_MOST, "{exits:?}");
    assert!((exits.after - exits.native).abs() < 2.0, "{exits:?}");
    Ok(())
}
