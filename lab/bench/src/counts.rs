//! The cost of a switch in instructions, on a machine with one CPU that counts them. A tick of its
//! TSC is an instruction.

use serde::Serialize;
use serde_json::Value;

use mercury_lab::{
    error::{Error, Result},
    kernel::Kernel,
    machine::Machine,
    spec::{Icount, Spec},
};

/// The number of measured switches. All of them take the same number of instructions.
const CYCLES: u32 = 20;

/// Instructions on one CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Memory of the machine.
    pub memory_mib: u32,
    /// Instructions of an attach with interrupts off: the maximum of all cycles.
    pub attach_instructions: u64,
    /// The minimum of all cycles.
    pub attach_instructions_min: u64,
    /// Instructions of a detach with interrupts off: the maximum of all cycles.
    pub detach_instructions: u64,
    /// The minimum of all cycles.
    pub detach_instructions_min: u64,
    /// Instructions of a hypercall into the hypervisor and back.
    pub exit_roundtrip_instructions: u64,
    /// Memory that Mercury holds while native.
    pub memory: Memory,
}

/// Memory that Mercury holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Bytes on any machine of this size.
    pub fixed_bytes: u64,
    /// Bytes for each CPU.
    pub per_cpu_bytes: u64,
    /// The number of CPUs that the machine may have.
    pub possible_cpus: u64,
}

impl Memory {
    /// Asks a machine on which the hypervisor is loaded.
    ///
    /// # Errors
    /// If the machine's answer is not as expected.
    pub fn of(machine: &Machine) -> Result<Self> {
        let status = machine.mercury("status")?;
        let number = |value: &Value| value.as_u64().ok_or_else(|| unexpected("status", &status));
        Ok(Self {
            fixed_bytes: number(&status["memory"]["fixed_bytes"])?,
            per_cpu_bytes: number(&status["memory"]["per_cpu_bytes"])?,
            possible_cpus: number(&status["possible_cpus"])?,
        })
    }
}

/// Returns the machine on which instructions are counted.
#[must_use]
pub fn counting_machine(memory_mib: u32) -> Spec {
    Spec::new(Kernel::BookwormCloud).cpus(1).memory_mib(memory_mib).icount(Icount::Exact)
}

/// Boots a machine with so much memory and counts.
///
/// # Errors
/// If the machine fails.
pub fn with_memory(memory_mib: u32) -> Result<Counts> {
    let machine = Machine::boot(counting_machine(memory_mib))?;
    let counts = count(&machine, memory_mib)?;
    machine.shut_down()?;
    Ok(counts)
}

/// Counts on a machine with one CPU, a tick of whose TSC is an instruction. The machine is native
/// afterwards.
///
/// # Errors
/// If the machine fails.
pub fn count(machine: &Machine, memory_mib: u32) -> Result<Counts> {
    machine.mercury("load")?;
    let memory = Memory::of(machine)?;
    let report = machine.mercury(&format!("bench switch --cycles {CYCLES}"))?;
    let number = |value: &Value| value.as_f64().ok_or_else(|| unexpected("bench switch", &report));
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

/// Returns the error for JSON that differs from docs/command.md.
pub(super) fn unexpected(command: &str, json: &Value) -> Error {
    Error::Host(format!("`mercury {command}` printed an unexpected answer: {json}"))
}
