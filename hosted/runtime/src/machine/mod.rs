//! The machine: a processor, its memory and its devices, and the answers to the guest's exits.

mod breakpoints;
mod calls;
mod debugging;
mod emulate;
mod faults;
mod interrupts;
mod layered;
mod moves;
mod operands;
mod program_memory;
mod resident;
mod retry;
mod saving;
mod turns;

use std::{
    collections::HashMap,
    ops::{Deref, DerefMut, Range},
    ptr::{self, NonNull},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering},
    },
};

use crate::{
    block::{self, Block, IF},
    boot::Bringup,
    entry, error,
    fork::Work,
    gdb::Debugger,
    isolation::stub::Stop,
    layout::{self, PAGE},
    memory::Memory,
    mmu::{self, Access, Privilege, Translation},
    patched,
    process::{Common, Placement, per_space::SpaceProcess},
    signal,
    smp::{Processor, apic::Apic, bus::Bus},
    thunks::{Cause, Exit, Gates},
    user_access::UserAccesses,
    vcpu::{PROGRAMS_OWN, Vcpu},
};
pub use breakpoints::Step;
pub use layered::Writer;
pub use resident::Resident;
use retry::Faulted;
pub use saving::Saving;

/// The exit status of the process after the guest has asked for a reset, as it does after a panic.
pub const RESET_STATUS: i32 = 10;
/// The exit status of the process if the guest cannot go on.
pub const BROKEN_STATUS: i32 = 11;

/// The only machine of this process. Code that runs after an exit finds the machine by
/// [`Turn::take`].
static MACHINE: AtomicPtr<Machine> = AtomicPtr::new(ptr::null_mut());
/// Set while the monitor uses the machine.
static IN_USE: AtomicBool = AtomicBool::new(false);
/// This process, if it is an address-space process, for handlers of signals that interrupt the
/// monitor.
static SPACE_PROCESS: OnceLock<SpaceProcess> = OnceLock::new();

/// The end of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest halted with interrupts off.
    Halted,
    /// The guest asked for a reset.
    Reset,
    /// The guest cannot go on.
    Broken,
    /// A person at the terminal, a debugger or a signal ended the machine.
    Ended,
}

/// An exception that the guest gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    pub vector: u8,
    /// Its error code, if it has one.
    pub error: Option<u32>,
    /// The address that a page fault is about.
    pub address: Option<u64>,
}

impl Exception {
    /// The exception for an instruction that does not exist.
    pub const UNDEFINED: Self = Self { vector: 6, error: None, address: None };
    /// The exception for a violation of protection.
    pub const PROTECTION: Self = Self { vector: 13, error: Some(0), address: None };

    /// Makes a page fault.
    #[must_use]
    pub fn page(error: u32, address: u64) -> Self {
        Self { vector: 14, error: Some(error), address: Some(address) }
    }
}

/// Events that are counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Slots that left the guest.
    pub exits: u64,
    /// Faults that the guest's page tables answered.
    pub fills: u64,
    /// Faults that the guest got.
    pub faults: u64,
    /// System calls of programs.
    pub system_calls: u64,
    pub interrupts: u64,
    /// Changes of the address space.
    pub switches: u64,
    /// Instructions recognized by their trap, not by their slot.
    pub trapped: u64,
    /// Traps in place of instructions that use a program's memory.
    pub user_accesses: u64,
    /// Uses of an address that is not a program's.
    pub refused: u64,
}

/// The parts of the machine that the processes of one processor share, besides the block.
#[derive(Debug)]
pub struct State {
    vcpu: Common<Vcpu>,
    counters: Common<Counters>,
    rewriting: &'static patched::Counters,
}

impl State {
    /// Maps the state. Processes made afterwards share it.
    ///
    /// # Errors
    /// If the host refuses the memory.
    pub fn new() -> error::Result<Self> {
        Ok(Self {
            vcpu: Common::new(Vcpu::default())?,
            counters: Common::new(Counters::default())?,
            rewriting: Common::new(patched::Counters::default())?.share(),
        })
    }

    /// Returns the counters of rewritten system calls.
    #[must_use]
    pub fn rewriting(&self) -> &'static patched::Counters {
        self.rewriting
    }
}

/// The addresses in the kernel's code at which the monitor has put something. The addresses of exit
/// jumps are in order.
#[derive(Debug, Default)]
pub struct LoadedCode {
    exits: Vec<Exit>,
    exit_jumps: Vec<u64>,
    accesses: UserAccesses,
    kernel_root: u64,
    returning: Range<u64>,
    /// The addresses to which slots jump to return from a system call: into the program, and out of
    /// the guest.
    system_returns: [u64; 2],
}

impl LoadedCode {
    /// Takes the exits of a loaded kernel, of which the last one is the gates'.
    #[must_use]
    pub fn new(exits: Vec<Exit>, accesses: UserAccesses, kernel_root: u64, gates: &Gates) -> Self {
        let slots = exits.len().saturating_sub(1);
        let exit_jumps = exits[..slots].iter().map(Exit::jump).collect();
        let [from, end] = gates.returning;
        let system_returns = [gates.system_return, gates.leaving];
        Self { exits, exit_jumps, accesses, kernel_root, returning: from..end, system_returns }
    }

    fn is_exit_jump(&self, address: u64) -> bool {
        self.exit_jumps.binary_search(&address).is_ok()
    }
}

/// The parts that a process has if it is one of several processors.
#[derive(Debug)]
pub struct LocalProcessor {
    processor: Processor,
    apic: Apic,
    bringup: Bringup,
}

impl LocalProcessor {
    /// Makes the parts of a processor whose time stamp counter has this frequency.
    ///
    /// # Errors
    /// If the host refuses a timer.
    pub fn new(processor: Processor, clock_khz: u64, bringup: Bringup) -> error::Result<Self> {
        Ok(Self { processor, apic: Apic::new(processor, clock_khz)?, bringup })
    }
}

/// The machine as one process has it. Only this module and its children use the fields.
#[derive(Debug)]
pub struct Machine {
    /// The processor, except for its registers in the block.
    vcpu: Common<Vcpu>,
    /// The values that the guest has written to model-specific registers without effect.
    other_registers: HashMap<u32, u64>,
    memory: Memory,
    devices: Bus,
    /// None if the machine has one processor.
    local: Option<LocalProcessor>,
    code: LoadedCode,
    resident: Resident,
    placement: Placement,
    debugger: Option<Debugger>,
    /// The last fault that the guest's kernel was given. It stays empty if programs are isolated.
    faulted: Option<Faulted>,
    counters: Common<Counters>,
    rewriting: &'static patched::Counters,
    verbose: bool,
    /// None if this process has no devices.
    saving: Option<Saving>,
    /// True if the guest goes on from a saved state.
    is_restored: bool,
}

impl Machine {
    /// Puts together a machine with one processor and no debugger.
    #[must_use]
    pub fn new(
        state: State,
        memory: Memory,
        devices: Bus,
        placement: Placement,
        code: LoadedCode,
        resident: Resident,
    ) -> Self {
        Self {
            vcpu: state.vcpu,
            other_registers: HashMap::new(),
            memory,
            devices,
            local: None,
            code,
            resident,
            placement,
            debugger: None,
            faulted: None,
            counters: state.counters,
            rewriting: state.rewriting,
            verbose: false,
            saving: None,
            is_restored: false,
        }
    }

    /// Makes this process one of several processors.
    #[must_use]
    pub fn with_local(self, local: Option<LocalProcessor>) -> Self {
        Self { local, ..self }
    }

    #[must_use]
    pub fn with_debugger(self, debugger: Option<Debugger>) -> Self {
        Self { debugger, ..self }
    }

    /// Lets a person save the machine.
    #[must_use]
    pub fn with_saving(self, saving: Option<Saving>) -> Self {
        Self { saving, ..self }
    }

    /// Makes the machine report strange events and its counters.
    #[must_use]
    pub fn with_reports(self, verbose: bool) -> Self {
        Self { verbose, ..self }
    }

    /// Returns the processes in which programs run.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the processor that this process is, if there are several.
    #[must_use]
    pub fn processor(&self) -> Option<Processor> {
        self.local.as_ref().map(|local| local.processor)
    }

    fn apic(&self) -> Option<&Apic> {
        self.local.as_ref().map(|local| &local.apic)
    }

    fn apic_mut(&mut self) -> Option<&mut Apic> {
        self.local.as_mut().map(|local| &mut local.apic)
    }

    /// Gives the processor the state in which the guest begins.
    pub fn begin_with(&mut self, vcpu: Vcpu) {
        *self.vcpu = vcpu;
        self.other_registers.clear();
    }

    /// Returns true if an address lies in the direct map.
    #[must_use]
    pub fn is_direct(&self, address: u64) -> bool {
        self.memory.direct(address).is_some()
    }

    /// Drops a patched copy of a page to which a debugger has written.
    pub fn note_write(&mut self, physical: u64) {
        if let Some(copies) = &mut self.resident.copies {
            copies.written(&self.memory, physical);
        }
    }

    /// Restores the terminal.
    pub fn restore_terminal(&mut self) {
        self.devices.restore();
    }

    /// Returns true if the guest goes on in another process.
    #[must_use]
    pub fn is_left(&self) -> bool {
        self.placement.per_space().is_some_and(|space| space.is_left())
    }

    /// Returns the block, which is mapped before there is a machine.
    #[must_use]
    pub fn block(&self) -> &'static Block {
        block::get()
    }

    /// Returns the privilege of the code that runs: a program or the kernel.
    #[must_use]
    pub fn privilege(&self) -> Privilege {
        if self.block().segments.get().cs & 3 == 3 { Privilege::User } else { Privilege::Kernel }
    }

    /// Lets the guest run. The function never returns: the process ends when the machine does.
    pub fn run(self) -> ! {
        let space = self.placement.per_space();
        if let Some(space) = space {
            let _ = SPACE_PROCESS.set(space);
        }
        MACHINE.store(Box::into_raw(Box::new(self)), Ordering::Release);
        let mut machine = Turn::expect();
        if space.is_none_or(|space| space.is_first()) {
            if !machine.is_restored {
                // SAFETY: The area is as large as the processor says, and at a multiple of 64.
                unsafe { entry::hosted_save_extended(machine.block().extended.get()) };
            }
            machine.leave_file();
            machine.attend_debugger();
        }
        match space {
            None => {
                machine.attend();
                machine.begin_restored();
            }
            Some(space) if space.is_first() => machine.serve_space_processes(space),
            Some(_) => machine.receive_guest(),
        }
        machine.begin_step();
        drop(machine);
        // SAFETY: The block holds a stack, a base of FS, and the registers of a guest that is ready.
        unsafe { entry::hosted_resume() };
        unreachable!("the guest does not return");
    }

    /// Prints the reason, restores the terminal, and ends the process.
    pub fn end(&mut self, how: End, why: &str) -> ! {
        if let Some(space) = self.placement.per_space().filter(|space| !space.is_first()) {
            loop {
                space.demand_end(how, why);
                let _ = space.hand_over(|| ());
            }
        }
        self.devices.restore();
        if !why.is_empty() {
            eprintln!("mercury hosted: {why}");
        }
        if how == End::Broken {
            eprintln!("{}", self.describe());
        }
        if self.verbose {
            eprintln!("mercury hosted: {:?}", *self.counters);
            eprintln!("mercury hosted: {:?}", self.rewriting);
            eprintln!(
                "mercury hosted: {:?}",
                self.placement.per_space().as_ref().map(SpaceProcess::counters)
            );
            eprintln!("mercury hosted: {:?}", self.placement.isolated().map(|isolated| isolated.counters));
        }
        std::process::exit(match how {
            End::Halted | End::Ended => 0,
            End::Reset => RESET_STATUS,
            End::Broken => BROKEN_STATUS,
        })
    }

    /// Describes the processor's state for a message.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("{} cr3 {:#x}", describe(self.block()), self.vcpu.cr3)
    }

    /// Returns the page tables for an address. The kernel's low addresses are not in programs'
    /// tables.
    fn root(&self, address: u64) -> u64 {
        if (layout::FIXMAP..layout::DIRECT_MAP).contains(&address) {
            self.code.kernel_root
        } else {
            self.vcpu.cr3
        }
    }

    /// Translates an address for the guest.
    ///
    /// # Errors
    /// The fault that the guest gets.
    pub fn translate(
        &self,
        address: u64,
        access: Access,
        privilege: Privilege,
    ) -> Result<Translation, Exception> {
        if let Some(physical) = self.memory.direct(address) {
            let (write, may_write, execute) = (true, true, true);
            return Ok(Translation { physical, size: PAGE, entry: 0, write, may_write, execute });
        }
        mmu::walk(&self.memory, self.root(address), address, access, privilege)
            .map_err(|error| Exception::page(error, address))
    }

    /// Reads memory at an address of the kernel.
    ///
    /// # Errors
    /// The fault that the guest gets.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Exception> {
        let mut done = 0;
        while done < into.len() {
            let at = address.wrapping_add(done as u64);
            let length = (Memory::rest_of_page(at) as usize).min(into.len() - done);
            let physical = self.translate(at, Access::Read, Privilege::Kernel)?.physical;
            let read = self.memory.read(physical, &mut into[done..done + length]);
            read.ok_or(Exception::page(0, at))?;
            done += length;
        }
        Ok(())
    }

    /// Writes memory at an address of the kernel.
    ///
    /// # Errors
    /// The fault that the guest gets.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Exception> {
        let mut done = 0;
        while done < bytes.len() {
            let at = address.wrapping_add(done as u64);
            let length = (Memory::rest_of_page(at) as usize).min(bytes.len() - done);
            let physical = self.translate(at, Access::Write, Privilege::Kernel)?.physical;
            let written = self.memory.write(physical, &bytes[done..done + length]);
            written.ok_or(Exception::page(2, at))?;
            done += length;
        }
        Ok(())
    }

    /// Reads a number of 64 bits.
    ///
    /// # Errors
    /// The fault that the guest gets.
    pub fn read_long(&self, address: u64) -> Result<u64, Exception> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Returns the flags as the guest knows them.
    #[must_use]
    pub fn flags(&self) -> u64 {
        flags(self.block())
    }

    /// Sets the flags as the guest knows them. The segments must be set before.
    pub fn set_flags(&mut self, flags: u64) {
        let block = self.block();
        block.registers.rflags.set(flags & visible_flags(block) | 2 | IF);
        block.flags.set(2 | flags & IF);
    }

    /// Returns true if the guest takes interrupts.
    #[must_use]
    pub fn interruptible(&self) -> bool {
        self.block().flags.get() & IF != 0
    }

    /// Returns true if a program is to run now, in another process.
    #[must_use]
    pub fn is_program_elsewhere(&self) -> bool {
        self.placement.isolated().is_some() && self.privilege() == Privilege::User
    }

    /// Runs programs in their processes until the guest's kernel must run.
    pub fn run_programs(&mut self) {
        while self.is_program_elsewhere() {
            if pending().load(Ordering::Acquire) != 0 && self.interruptible() {
                self.service();
                continue;
            }
            self.begin_step();
            if self.privilege() == Privilege::Kernel {
                return;
            }
            let block = self.block();
            let Some(isolated) = self.placement.isolated_mut() else { return };
            match isolated.run(&self.memory, self.vcpu.cr3, block) {
                Ok(Stop::Fault(fault)) => signal::answer(self, fault),
                Ok(Stop::Interrupted | Stop::Refused) => _ = self.end_step(false),
                Ok(Stop::Astray) => {
                    self.end_step(false);
                    self.inject(Exception::PROTECTION);
                }
                Err(error) => self.end(End::Broken, error.message()),
            }
        }
    }

    fn exit(&mut self) {
        self.counters.exits += 1;
        let index = self.block().exit.get() as usize;
        let Some(exit) = self.code.exits.get(index).copied() else {
            self.end(End::Broken, &format!("a slot with the unknown number {index}"));
        };
        self.block().registers.rip.set(exit.resume);
        match exit.cause {
            Cause::Sensitive(instruction) => {
                if let Err(exception) = self.emulate(&instruction) {
                    self.block().registers.rip.set(exit.original);
                    self.inject(exception);
                }
            }
            Cause::Uses(what) => self.use_program(what),
            Cause::UserAccess => self.use_program_address(exit.original),
            Cause::Pending => {}
        }
        if self.placement.per_space().is_some_and(|space| space.is_left()) {
            return;
        }
        if pending().load(Ordering::Acquire) != 0 && self.interruptible() {
            self.service();
        }
        self.save_if_wanted();
        self.obey_template(Work::Any);
    }
}

/// The flags that a process can have, and that mean the same there for programs and the kernel.
pub const VISIBLE: u64 = 0x24_0CD5;

/// Returns the block's byte for waiting interrupts.
#[must_use]
pub fn pending() -> &'static AtomicU8 {
    &block::get().pending
}

/// Returns true once the machine has begun to run.
pub(crate) fn is_there() -> bool {
    !MACHINE.load(Ordering::Acquire).is_null()
}

/// Returns this process, if it is an address-space process.
#[must_use]
pub fn space_process() -> Option<SpaceProcess> {
    SPACE_PROCESS.get().copied()
}

/// The right to use the machine, while the guest does not run in this process. One exists at a
/// time.
#[derive(Debug)]
pub struct Turn(NonNull<Machine>);

impl Turn {
    /// Takes the machine. Returns nothing if there is no machine yet, or if the monitor already
    /// uses it. In the second case a signal has interrupted the monitor.
    #[must_use]
    pub fn take() -> Option<Self> {
        let machine = NonNull::new(MACHINE.load(Ordering::Acquire))?;
        // Only the thread that runs the guest comes here, and an interruption leaves the flag as it
        // finds it.
        if IN_USE.load(Ordering::Relaxed) {
            return None;
        }
        IN_USE.store(true, Ordering::Relaxed);
        Some(Self(machine))
    }

    /// Takes the machine at a place where only a bug can make it unavailable.
    fn expect() -> Self {
        Self::take().unwrap_or_else(|| {
            eprintln!("mercury hosted: the guest was left while the monitor ran: this is a bug");
            // SAFETY: It ends the process.
            unsafe { libc::_exit(BROKEN_STATUS) }
        })
    }
}

impl Deref for Turn {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        // SAFETY: The machine is never freed, and `IN_USE` keeps others from it until this is dropped.
        unsafe { self.0.as_ref() }
    }
}

impl DerefMut for Turn {
    fn deref_mut(&mut self) -> &mut Machine {
        // SAFETY: As for `deref`.
        unsafe { self.0.as_mut() }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        IN_USE.store(false, Ordering::Relaxed);
    }
}

/// Returns the flags that mean the same in the process. A program may have more of them than a
/// kernel.
fn visible_flags(block: &Block) -> u64 {
    if block.segments.get().cs & 3 == 3 { VISIBLE | PROGRAMS_OWN } else { VISIBLE }
}

/// Returns the flags as the guest knows them.
fn flags(block: &Block) -> u64 {
    block.registers.rflags.get() & visible_flags(block) | 2 | block.flags.get() & IF
}

/// Describes the part of the processor's state that is in the block.
pub(crate) fn describe(block: &Block) -> String {
    let names = ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi"];
    let mut text = format!(
        "  rip {:#x} cs {:#x} flags {:#x} cr2 {:#x} gs {:#x}",
        block.registers.rip.get(),
        block.segments.get().cs,
        flags(block),
        block.cr2.get(),
        block.gs.get()
    );
    for (at, value) in block.registers.values().iter().enumerate() {
        let name = names.get(at).map_or_else(|| format!("r{at}"), |name| (*name).to_owned());
        text += &format!("{}{name} {value:#x}", if at % 4 == 0 { "\n  " } else { " " });
    }
    text
}

/// Answers an exit by a slot.
pub extern "C" fn handle_exit() {
    let mut machine = Turn::expect();
    machine.exit();
    machine.run_programs();
    machine.resume_or_hand_over();
    machine.begin_step();
}

/// Goes on with a program, after the guest's kernel has returned to it without a slot.
pub extern "C" fn handle_program() {
    let mut machine = Turn::expect();
    machine.run_programs();
    machine.resume_or_hand_over();
    machine.begin_step();
}

/// Answers a call of another processor, or delivers an interrupt that the guest now takes.
pub extern "C" fn handle_pending() {
    let mut machine = Turn::expect();
    machine.end_step(false);
    machine.deliver_pending();
    machine.resume_or_hand_over();
    machine.begin_step();
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::{block::Segments, testing};

    /// Gives a test a machine that has a block, memory and nothing else, with a descriptor table at
    /// the memory's beginning.
    pub fn with_machine<T>(test: impl FnOnce(&mut Machine) -> T) -> T {
        testing::with_own_memory(|memory| {
            block::tests::ensure();
            let block = block::get();
            block.registers.general.iter().for_each(|register| register.set(0));
            block.flags.set(2);
            block.registers.rflags.set(2);
            block.segments.set(Segments::default());
            [&block.registers.rip, &block.gs, &block.gs_other].iter().for_each(|value| value.set(0));
            let (state, resident) = (State::new().unwrap(), Resident::new(u64::MAX, None));
            let code = LoadedCode::default();
            let mut machine = Machine::new(state, memory, Bus::Absent, Placement::One, code, resident);
            let result = test(&mut machine);
            (machine.memory, result)
        })
    }

    #[test]
    fn the_machine_is_not_taken_while_it_is_used() {
        with_machine(|machine| {
            MACHINE.store(machine, Ordering::Release);
            let mut first = Turn::take().unwrap();
            first.vcpu.cr3 = 7;
            // A signal that interrupts the monitor finds the machine in use.
            assert!(Turn::take().is_none());
            assert_eq!(first.vcpu.cr3, 7);
            drop(first);
            assert_eq!(Turn::take().unwrap().vcpu.cr3, 7);
            MACHINE.store(ptr::null_mut(), Ordering::Release);
            assert!(Turn::take().is_none());
        });
    }
}
