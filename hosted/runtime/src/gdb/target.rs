//! The machine as gdb sees and changes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    ptr::{self, NonNull},
};

use gdbstub::{
    common::Signal,
    target::{
        TargetError, TargetResult,
        ext::{
            base::{
                BaseOps,
                singlethread::{
                    SingleThreadBase, SingleThreadResume, SingleThreadResumeOps, SingleThreadSingleStep,
                    SingleThreadSingleStepOps,
                },
            },
            breakpoints::{Breakpoints, BreakpointsOps, SwBreakpoint, SwBreakpointOps},
        },
    },
};
use iced_x86::{Decoder, DecoderOptions, Register};

use super::{
    KernelCode,
    registers::{ORDER, State, X86},
    step::{self, Guest},
};
use crate::{
    layout::THUNKS,
    load::Filled,
    machine::Machine,
    memory::Memory,
    mmu::{Access, Privilege},
    selectors,
};

const INT3: u8 = 0xCC;

/// The way in which the guest goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Until something stops it.
    Continue,
    Step,
}

/// The machine, while gdb has it.
#[derive(Debug)]
pub struct Target {
    machine: *mut Machine,
    /// The addresses of the kernel's code.
    code: Vec<Range<u64>>,
    /// Filled slots, by their addresses.
    slots: BTreeMap<u64, Filled>,
    /// Their addresses, by where their code begins, and where all of it is.
    slots_by_code: BTreeMap<u64, u64>,
    slot_code: Range<u64>,
    wanted: BTreeSet<u64>,
    /// Places that the step leads to.
    steps: BTreeSet<u64>,
    /// The original bytes under all breakpoints.
    replaced: BTreeMap<u64, u8>,
    /// The way in which the guest goes on.
    pub action: Action,
    /// A step is being made, and nothing has come between.
    pub holds_interrupts: bool,
}

impl Target {
    /// Makes the target for a machine with this code.
    pub fn new(code: KernelCode) -> Self {
        Self {
            machine: ptr::null_mut(),
            code: code.ranges,
            slots_by_code: code.slots.iter().map(|(at, slot)| (slot.code, *at)).collect(),
            slots: code.slots,
            slot_code: THUNKS..THUNKS + code.slot_code,
            wanted: BTreeSet::new(),
            steps: BTreeSet::new(),
            replaced: BTreeMap::new(),
            action: Action::Continue,
            holds_interrupts: false,
        }
    }

    /// Takes the machine, which is stopped until [`Self::leave`].
    pub fn enter(&mut self, machine: &mut Machine) {
        self.machine = machine;
    }

    /// Gives the machine back to its owner.
    pub fn leave(&mut self) {
        self.machine = ptr::null_mut();
    }

    fn machine(&mut self) -> TargetResult<&mut Machine, Self> {
        // SAFETY: The caller of `enter` has the machine and does not use it until `leave`, which
        // makes the pointer null.
        NonNull::new(self.machine).map(|mut machine| unsafe { machine.as_mut() }).ok_or(TargetError::NonFatal)
    }

    /// Returns true if there is a breakpoint.
    pub fn has_breakpoint(&self, at: u64) -> bool {
        self.replaced.contains_key(&at)
    }

    /// Returns true if a step has come to its end here.
    pub fn has_step_to(&self, at: u64) -> bool {
        self.steps.contains(&at) && !self.wanted.contains(&at)
    }

    /// Returns true if a breakpoint may be here: in the kernel's code, and only at the start of the
    /// jump that a slot has become.
    fn may_break(&self, at: u64) -> bool {
        let slot = self.slots.range(..at).next_back();
        let is_inside = slot.is_some_and(|(start, slot)| at < start + slot.bytes.len() as u64);
        !is_inside && self.code.iter().any(|range| range.contains(&at))
    }

    fn put(&mut self, machine: &mut Machine, at: u64) -> bool {
        let mut byte = [0];
        if self.has_breakpoint(at) {
            return true;
        }
        if !self.may_break(at) || machine.read(at, &mut byte).is_err() || machine.write(at, &[INT3]).is_err()
        {
            return false;
        }
        self.replaced.insert(at, byte[0]);
        true
    }

    /// Removes a breakpoint, unless it is still one for another reason.
    fn drop(&mut self, machine: &mut Machine, at: u64) {
        if self.wanted.contains(&at) || self.steps.contains(&at) {
            return;
        }
        if let Some(byte) = self.replaced.remove(&at) {
            // It was written to before.
            let _ = machine.write(at, &[byte]);
        }
    }

    /// Puts breakpoints wherever the next instruction leads.
    pub fn begin_step(&mut self, machine: &mut Machine) {
        let rip = self.shown(machine);
        let mut bytes = [0; 15];
        let length = read(machine, rip, &mut bytes);
        self.hide(rip, &mut bytes[..length]);
        let leads = match self.slots.get(&rip) {
            Some(slot) => step::successors(&slot.bytes, rip, machine),
            None => {
                let first = Decoder::with_ip(64, &bytes[..length], rip, DecoderOptions::NONE).decode();
                step::successors(&bytes[..first.len()], rip, machine)
            }
        };
        for at in leads {
            if self.put(machine, at) {
                self.steps.insert(at);
            }
        }
        self.holds_interrupts = !self.steps.is_empty();
    }

    /// Ends a step, wherever it has led.
    pub fn end_step(&mut self, machine: &mut Machine) {
        self.holds_interrupts = false;
        self.action = Action::Continue;
        for at in std::mem::take(&mut self.steps) {
            self.drop(machine, at);
        }
        // Interrupts may have waited.
        crate::machine::pending().store(1, std::sync::atomic::Ordering::Release);
    }

    /// Removes all breakpoints, after gdb is gone.
    pub fn remove_all(&mut self, machine: &mut Machine) {
        for at in std::mem::take(&mut self.wanted) {
            self.drop(machine, at);
        }
        self.action = Action::Continue;
    }

    /// Returns the instruction pointer that gdb is shown. In a patched copy it is the program's
    /// own; in a thunk it is the slot's.
    fn shown(&self, machine: &Machine) -> u64 {
        let rip = machine.block().registers.rip.get();
        if self.slot_code.contains(&rip) {
            return self.slots_by_code.range(..=rip).next_back().map_or(rip, |(_, slot)| *slot);
        }
        machine.visible(rip)
    }

    /// Shows what was there before breakpoints.
    fn hide(&self, start: u64, bytes: &mut [u8]) {
        let end = start.saturating_add(bytes.len() as u64);
        for (at, byte) in self.replaced.range(start..end) {
            bytes[(at - start) as usize] = *byte;
        }
    }
}

/// Reads as much as there is.
fn read(machine: &Machine, start: u64, into: &mut [u8]) -> usize {
    let mut done = 0;
    while done < into.len() {
        let at = start.wrapping_add(done as u64);
        let length = (Memory::rest_of_page(at) as usize).min(into.len() - done);
        if machine.read(at, &mut into[done..done + length]).is_err() {
            break;
        }
        done += length;
    }
    done
}

impl Guest for Machine {
    fn register(&self, register: Register) -> u64 {
        match register {
            Register::FS => self.block().fs.get(),
            Register::GS => self.block().gs.get(),
            _ if register.is_segment_register() => 0,
            _ => {
                let value = self.block().registers.general[register.full_register().number() & 15].get();
                if register.size() == 4 { value & 0xFFFF_FFFF } else { value }
            }
        }
    }

    fn long(&self, address: u64) -> Option<u64> {
        self.read_long(address).ok()
    }
}

impl gdbstub::target::Target for Target {
    type Arch = X86;
    type Error = &'static str;

    fn base_ops(&mut self) -> BaseOps<'_, X86, &'static str> {
        BaseOps::SingleThread(self)
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }
}

impl SingleThreadBase for Target {
    fn read_registers(&mut self, state: &mut State) -> TargetResult<(), Self> {
        let machine = &*self.machine()?;
        let block = machine.block();
        for (value, number) in state.general.iter_mut().zip(ORDER) {
            *value = block.registers.general[number].get();
        }
        let [es, ds, fs, gs] = selectors::read();
        state.segments = [block.segments.get().cs, block.segments.get().ss, ds, es, fs, gs].map(u32::from);
        state.bases = [block.fs.get(), block.gs.get()];
        state.flags = machine.flags() as u32;
        let machine: *const Machine = machine;
        // SAFETY: As in `machine`; it is not part of this.
        state.rip = self.shown(unsafe { &*machine });
        Ok(())
    }

    fn write_registers(&mut self, state: &State) -> TargetResult<(), Self> {
        let machine: *mut Machine = self.machine()?;
        // SAFETY: As in `machine`; it is not part of this.
        let machine = unsafe { &mut *machine };
        let block = machine.block();
        for (value, number) in state.general.iter().zip(ORDER) {
            block.registers.general[number].set(*value);
        }
        let [fs, gs] = state.bases;
        block.fs.set(fs);
        block.gs.set(gs);
        if state.rip != self.shown(machine) {
            block.registers.rip.set(state.rip);
        }
        machine.set_flags(state.flags.into());
        Ok(())
    }

    fn read_addrs(&mut self, start: u64, into: &mut [u8]) -> TargetResult<usize, Self> {
        let done = read(self.machine()?, start, into);
        if done == 0 && !into.is_empty() {
            return Err(TargetError::Errno(libc::EFAULT as u8));
        }
        self.hide(start, &mut into[..done]);
        Ok(done)
    }

    fn write_addrs(&mut self, start: u64, bytes: &[u8]) -> TargetResult<(), Self> {
        let mut bytes = bytes.to_vec();
        let end = start.saturating_add(bytes.len() as u64);
        for (at, byte) in self.replaced.range_mut(start..end) {
            *byte = std::mem::replace(&mut bytes[(at - start) as usize], INT3);
        }
        let machine = self.machine()?;
        let found = machine.translate(start, Access::Write, Privilege::Kernel);
        let done = machine.write(start, &bytes).map_err(|_| TargetError::Errno(libc::EFAULT as u8));
        if let Ok(found) = found {
            machine.note_write(found.physical);
        }
        done
    }

    fn support_resume(&mut self) -> Option<SingleThreadResumeOps<'_, Self>> {
        Some(self)
    }
}

impl SingleThreadResume for Target {
    fn resume(&mut self, _: Option<Signal>) -> Result<(), &'static str> {
        self.action = Action::Continue;
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<SingleThreadSingleStepOps<'_, Self>> {
        Some(self)
    }
}

impl SingleThreadSingleStep for Target {
    fn step(&mut self, _: Option<Signal>) -> Result<(), &'static str> {
        self.action = Action::Step;
        Ok(())
    }
}

impl Breakpoints for Target {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Target {
    fn add_sw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        let machine: *mut Machine = self.machine()?;
        // SAFETY: As in `machine`; it is not part of this.
        let is_there = self.put(unsafe { &mut *machine }, at);
        if is_there {
            self.wanted.insert(at);
        }
        Ok(is_there)
    }

    fn remove_sw_breakpoint(&mut self, at: u64, _: usize) -> TargetResult<bool, Self> {
        let machine: *mut Machine = self.machine()?;
        let was_there = self.wanted.remove(&at);
        // SAFETY: As in `machine`; it is not part of this.
        self.drop(unsafe { &mut *machine }, at);
        Ok(was_there)
    }
}
