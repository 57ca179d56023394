//! What a switch costs, in instructions: on a machine with one CPU that counts them, where a tick of the
//! TSC is an instruction.

use serde::Serialize;
use serde_json::Value;

use mercury_lab::{
    error::{Error, Result},
    kernel::Kernel,
    machine::Machine,
    spec::{Icount, Spec},
};

/// Switches measured; all of them take the same number of instructions.
const CYCLES: u32 = 20;

/// Instructions on one CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Of the machine.
    pub memory_mib: u32,
    /// Attach with interrupts off; the most of all cycles.
    pub attach_instructions: u64,
    /// The fewest.
    pub attach_instructions_min: u64,
    /// Detach with interrupts off; the most of all cycles.
    pub detach_instructions: u64,
    /// The fewest.
    pub detach_instructions_min: u64,
    /// A hypercall into the hypervisor and back.
    pub exit_roundtrip_instructions: u64,
    /// What Mercury holds while native.
    pub memory: Memory,
}

/// What Mercury holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// On any machine of this size.
    pub fixed_bytes: u64,
    /// For each CPU.
    pub per_cpu_bytes: u64,
    /// For all of the machine's CPUs.
    pub possible_cpus: u64,
}

impl Memory {
    /// Asks a machine on which the hypervisor is loaded.
    ///
    /// # Errors
    /// If it does not say.
    pub fn of(machine: &Machine) -> Result<Self> {
        let status = machine.mercury("status")?;
        let number = |value: &Value| value.as_u64().ok_or_else(|| strange("status", &status));
        Ok(Self {
            fixed_bytes: number(&status["memory"]["fixed_bytes"])?,
            per_cpu_bytes: number(&status["memory"]["per_cpu_bytes"])?,
            possible_cpus: number(&status["possible_cpus"])?,
        })
    }
}

/// The machine on which instructions are counted.
#[must_use]
pub fn counting_machine(memory_mib: u32) -> Spec {
    Spec::new(Kernel::BookwormCloud).cpus(1).memory_mib(memory_mib).icount(Icount::Exact)
}

/// Boots a machine of so much memory and counts.
///
/// # Errors
/// If the machine fails.
pub fn with_memory(memory_mib: u32) -> Result<Counts> {
    let machine = Machine::boot(counting_machine(memory_mib))?;
    let counts = count(&machine, memory_mib)?;
    machine.shut_down()?;
    Ok(counts)
}

/// Counts on a machine with one CPU, a tick of whose TSC is an instruction. It is native afterwards.
///
/// # Errors
/// If the machine fails.
pub fn count(machine: &Machine, memory_mib: u32) -> Result<Counts> {
    machine.mercury("load")?;
    let memory = Memory::of(machine)?;
    let report = machine.mercury(&format!("bench switch --cycles {CYCLES}"))?;
    let number = |value: &Value| value.as_f64().ok_or_else(|| strange("bench switch", &report));
    let ticks = |which: &str, of: &str| number(&report[which]["all_ticks"][of]).map(|ticks| ticks as u64);
    Ok(Counts {
        memory_mib,
        attach_instructions: ticks("attach", "max")?,
        attach_instructions_min: ticks("attach", "min")?,
        detach_instructions: ticks("detach", "max")?,
        detach_instructions_min: ticks("detach", "min")?,
        exit_roundtrip_instructions: number(&report["round_trip"][0]["ticks"])?.round() as u64,
        memory,
    })
}

/// JSON that is not as docs/command.md says.
pub(super) fn strange(command: &str, json: &Value) -> Error {
    Error::Host(format!("`mercury {command}` says something strange: {json}"))
}
