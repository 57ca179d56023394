//! The machine: a processor, its memory and its devices, and what it does when the guest is left.

mod emulate;
mod program_memory;
mod resident;
mod retry;

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
    entry,
    gdb::Debugger,
    isolation::{Spaces, mappings::Mappings, stub::Stop},
    layout::{self, PAGE},
    machine::retry::Faulted,
    memory::{Memory, Rights},
    mmu::{self, Access, Privilege, Translation},
    patched::{self, Mapped, Shadows},
    process::per_space::{Common, Home, Request},
    signal,
    smp::{
        self, Processor,
        apic::{self, Apic},
        bus::Bus,
    },
    thunks::{self, Cause, Exit},
    user_access::Guards,
    vcpu::{ALIGNMENT, DEBUG_STATUS, DEBUG_STEP, PROGRAMS_OWN, TRAP, Vcpu},
};

/// Pages mapped beside the one that was missing, at most, to each side.
const NEIGHBOURS: u64 = 64;

/// The process' exit status after the guest has asked for a reset, as it does after a panic.
pub const RESET_STATUS: i32 = 10;
/// The process' exit status if the guest cannot go on.
pub const BROKEN_STATUS: i32 = 11;

/// The only one of this process. Code that the guest is left for finds it by [`Turn::take`].
static MACHINE: AtomicPtr<Machine> = AtomicPtr::new(ptr::null_mut());
/// Set while the monitor uses the machine.
static IN_USE: AtomicBool = AtomicBool::new(false);
/// The process' home, if it is one, for handlers of signals that interrupt the monitor.
static HOME: OnceLock<Home> = OnceLock::new();

/// How the machine has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest halted with interrupts off.
    Halted,
    /// The guest asked for a reset.
    Reset,
    /// The guest did something that nobody can go on from.
    Broken,
    /// Somebody at the terminal ended it.
    Ended,
}

/// An exception that the guest gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Its vector.
    pub vector: u8,
    /// Its error code, if it has one.
    pub error: Option<u32>,
    /// The address that a page fault is about.
    pub address: Option<u64>,
}

impl Exception {
    /// An instruction that does not exist.
    pub const UNDEFINED: Self = Self { vector: 6, error: None, address: None };
    /// Something that is not allowed.
    pub const PROTECTION: Self = Self { vector: 13, error: Some(0), address: None };

    /// A page fault.
    #[must_use]
    pub fn page(error: u32, address: u64) -> Self {
        Self { vector: 14, error: Some(error), address: Some(address) }
    }
}

/// What has been counted.
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
    /// Interrupts delivered.
    pub interrupts: u64,
    /// Changes of the address space.
    pub switches: u64,
    /// Instructions recognized by their trap, not by their slot.
    pub trapped: u64,
    /// Traps in place of what uses a program's memory.
    pub guarded: u64,
    /// Uses of an address that is not a program's.
    pub refused: u64,
}

/// All of it.
#[derive(Debug)]
pub struct Machine {
    /// The processor, but for what is in the block.
    pub vcpu: Common<Vcpu>,
    /// Model-specific registers that mean nothing here, as far as they were written.
    pub other_registers: HashMap<u32, u64>,
    /// Memory.
    pub memory: Memory,
    /// Devices, or the way to them.
    pub devices: Bus,
    /// Which processor this is, if there are several.
    pub processor: Option<Processor>,
    /// Its interrupt controller, then.
    pub apic: Option<Apic>,
    /// How it begins, then, if it is not the first.
    pub bringup: Option<Bringup>,
    /// Places where slots leave the guest.
    pub exits: Vec<Exit>,
    /// Where they jump to the monitor, in order.
    pub exit_jumps: Vec<u64>,
    /// Instructions of the kernel's that have become traps, for they use programs' memory.
    pub guards: Guards,
    /// The kernel's own page tables.
    pub kernel_root: u64,
    /// What has been counted.
    pub counters: Common<Counters>,
    /// What has been counted of rewritten system calls.
    pub rewriting: &'static patched::Counters,
    /// Mappings made since all were dropped.
    pub mapped: u64,
    /// Those of them that are programs'.
    pub programs: Mappings,
    /// How many the host allows.
    pub most_mapped: u64,
    /// Copies of programs' pages, in which system calls are rewritten; unless they are to be left.
    pub shadows: Option<Shadows>,
    /// The processes that programs run in, if they do not run in this one.
    pub spaces: Option<Spaces>,
    /// Which process this is, if each address space has one.
    pub home: Option<Home>,
    /// The code that returns from a system call, behind its look at what waits.
    pub returning: Range<u64>,
    /// The debugger's end.
    pub debugger: Option<Debugger>,
    /// The last fault that the guest's kernel was given, unless programs run in other processes.
    pub faulted: Option<Faulted>,
    /// Say what is strange.
    pub verbose: bool,
}

impl Machine {
    /// Returns the block, which is mapped before there is a machine.
    #[must_use]
    pub fn block(&self) -> &'static Block {
        block::get()
    }

    /// Whether a program runs, or the kernel.
    #[must_use]
    pub fn privilege(&self) -> Privilege {
        if self.block().segments.get().cs & 3 == 3 { Privilege::User } else { Privilege::Kernel }
    }

    /// Lets the guest run. Comes back never: the process ends when the machine does.
    pub fn run(self) -> ! {
        let home = self.home;
        if let Some(home) = home {
            let _ = HOME.set(home);
        }
        MACHINE.store(Box::into_raw(Box::new(self)), Ordering::Release);
        let mut machine = Turn::expect();
        if home.is_none_or(|home| home.is_first()) {
            // SAFETY: The area is as large as the processor says, and at a multiple of 64.
            unsafe { entry::hosted_save_extended(machine.block().extended.get()) };
            machine.attend_debugger();
        }
        match home {
            None => machine.attend(),
            Some(home) if home.is_first() => machine.serve_homes(home),
            Some(_) => machine.move_in(),
        }
        drop(machine);
        // SAFETY: The block holds a stack, a base of FS, and the registers of a guest that is ready.
        unsafe { entry::hosted_resume() };
        unreachable!("the guest does not return");
    }

    /// Says why, gives the terminal back, and ends the process.
    pub fn end(&mut self, how: End, why: &str) -> ! {
        if let Some(home) = self.home.filter(|home| !home.is_first()) {
            loop {
                home.demand_end(how, why);
                let _ = home.hand_over();
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
            eprintln!("mercury hosted: {:?}", self.home.as_ref().map(Home::counters));
            eprintln!("mercury hosted: {:?}", self.spaces.as_ref().map(|spaces| spaces.counters));
        }
        std::process::exit(match how {
            End::Halted | End::Ended => 0,
            End::Reset => RESET_STATUS,
            End::Broken => BROKEN_STATUS,
        })
    }

    /// Describes the processor's state for people.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("{} cr3 {:#x}", describe(self.block()), self.vcpu.cr3)
    }

    /// The page tables that an address is looked up in: those of the kernel's low addresses are not in programs' tables.
    fn root(&self, address: u64) -> u64 {
        if (layout::FIXMAP..layout::DIRECT_MAP).contains(&address) { self.kernel_root } else { self.vcpu.cr3 }
    }

    /// Translates for the guest.
    ///
    /// # Errors
    /// The fault that it gets.
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

    /// Reads what the kernel sees at an address.
    ///
    /// # Errors
    /// The fault that it gets.
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

    /// Writes what the kernel sees at an address.
    ///
    /// # Errors
    /// The fault that it gets.
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

    /// Reads a number.
    ///
    /// # Errors
    /// The fault that the guest gets.
    pub fn read_long(&self, address: u64) -> Result<u64, Exception> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// The flags as the guest knows them.
    #[must_use]
    pub fn flags(&self) -> u64 {
        flags(self.block())
    }

    /// Sets the flags as the guest knows them. Segments have to be set before.
    pub fn set_flags(&mut self, flags: u64) {
        let block = self.block();
        block.registers.rflags.set(flags & visible_flags(block) | 2 | IF);
        block.flags.set(2 | flags & IF);
    }

    /// Whether the guest takes interrupts.
    #[must_use]
    pub fn interruptible(&self) -> bool {
        self.block().flags.get() & IF != 0
    }

    /// An interrupt may come between a slot's naming the exit and its jump to the monitor, and whatever handles it will use
    /// others: the name has to be written again afterwards.
    pub fn begin_exit_again(&mut self) {
        let registers = &self.block().registers;
        if self.exit_jumps.binary_search(&registers.rip.get()).is_ok() {
            registers.rip.set(registers.rip.get() - thunks::NAMING_LENGTH);
        }
    }

    /// Looks at the devices, and delivers an interrupt if there is one and the guest takes it.
    pub fn service(&mut self) {
        if self.ask_first(Request::Look) {
            return;
        }
        pending().store(0, Ordering::Release);
        self.attend_debugger();
        if self.is_stepping() {
            // Interrupts come when the step is over.
            return;
        }
        self.attend();
        self.devices.poll(&self.memory);
        if let (Some(one), Some(apic)) = (&self.processor, &mut self.apic) {
            one.look();
            apic.poll();
        }
        if self.interruptible()
            && let Some(vector) = self.acknowledge()
        {
            self.counters.interrupts += 1;
            self.inject(Exception { vector, error: None, address: None });
        }
        if self.has_interrupt() {
            pending().store(1, Ordering::Release);
        }
        if let Some(how) = self.devices.ended() {
            self.end(how, "");
        }
    }

    /// Looks at what waits, and delivers an interrupt if the guest takes it.
    pub fn look(&mut self) {
        self.attend();
        if self.interruptible() && pending().load(Ordering::Acquire) != 0 {
            self.service();
        }
    }

    /// The vector of the interrupt that is delivered now.
    fn acknowledge(&mut self) -> Option<u8> {
        let vector = self.apic.as_mut().and_then(Apic::acknowledge);
        vector.or_else(|| self.devices.acknowledge())
    }

    /// Whether an interrupt waits.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.devices.has_interrupt() || self.apic.as_ref().is_some_and(Apic::has_interrupt)
    }

    /// Looks at what does not wait until the guest takes interrupts. Another processor may have called: it has a question for the
    /// first one, or has reset this one, which waits to be started, then. Or the machine has to end.
    pub fn attend(&mut self) {
        if self.ask_first(Request::Look) {
            return;
        }
        smp::called().store(0, Ordering::SeqCst);
        if signal::is_end_wanted() {
            self.end(End::Ended, "ended by a signal");
        }
        if signal::is_child_gone() {
            self.end(End::Broken, &signal::how_child_has_ended());
        }
        let Some(one) = self.processor else { return };
        if one.is_first() {
            self.devices.serve(&one, &self.memory);
            if self.has_interrupt() {
                pending().store(1, Ordering::Release);
            }
        } else if one.is_reset() {
            while !one.starts() {
                smp::sleep();
                pending().store(0, Ordering::Release);
            }
            self.begin();
        }
    }

    /// This processor, which is not the first, begins where the first wants it to.
    fn begin(&mut self) {
        self.drop_all();
        if let (Some(one), Some(apic)) = (&self.processor, &mut self.apic) {
            one.look();
            apic.reset();
        }
        let begun = self.bringup.is_some_and(|bringup| bringup.begin(self).is_ok());
        if !begun {
            self.end(End::Broken, "a processor was started without a stack");
        }
    }

    /// Whether a program is to run now, in another process.
    #[must_use]
    pub fn is_program_elsewhere(&self) -> bool {
        self.spaces.is_some() && self.privilege() == Privilege::User
    }

    /// Lets programs run in their processes until the guest's kernel has to.
    pub fn run_programs(&mut self) {
        while self.is_program_elsewhere() {
            if pending().load(Ordering::Acquire) != 0 && self.interruptible() {
                self.service();
                continue;
            }
            let block = self.block();
            let Some(spaces) = &mut self.spaces else { return };
            match spaces.run(&self.memory, self.vcpu.cr3, block) {
                Ok(Stop::Fault(fault)) => signal::answer(self, fault),
                Ok(Stop::Interrupted | Stop::Refused) => {}
                Ok(Stop::Astray) => self.inject(Exception::PROTECTION),
                Err(error) => self.end(End::Broken, error.message()),
            }
        }
    }

    /// An address that is not mapped, or not so: maps what the guest's page tables have there, or gives it the fault.
    pub fn page_fault(&mut self, address: u64, code: u64) {
        let access = match code {
            _ if code & 16 != 0 => Access::Execute,
            _ if code & 2 != 0 => Access::Write,
            _ => Access::Read,
        };
        if self.privilege() == Privilege::User && !self.may_belong_to_program(address) {
            // The kernel gives no program these addresses, and finds nothing there.
            self.counters.faults += 1;
            return self.inject(Exception::page(mmu::missing(access), address));
        }
        if self.is_for_a_copy(address, access) {
            return;
        }
        if self.is_a_single_use(address) && self.perform_moves() {
            return;
        }
        match self.fill(address, access) {
            Ok(()) => self.counters.fills += 1,
            Err(exception) => {
                self.counters.faults += 1;
                if self.is_program_elsewhere()
                    && let Some(spaces) = &mut self.spaces
                {
                    spaces.ask(self.vcpu.cr3, address, access);
                } else if self.spaces.is_none() {
                    self.note_fault(address, access);
                }
                self.inject(exception);
            }
        }
    }

    /// Whether the kernel writes to a page by its direct map, which was only forbidden for a copy's sake.
    fn is_for_a_copy(&mut self, address: u64, access: Access) -> bool {
        let physical = self.memory.direct(address).filter(|_| access == Access::Write);
        let (Some(physical), Some(shadows)) = (physical, &mut self.shadows) else { return false };
        shadows.written(&self.memory, physical)
    }

    /// Whether a program could have this address if its kernel said so.
    fn may_belong_to_program(&self, address: u64) -> bool {
        const ANYWHERE: std::ops::Range<u64> = layout::USER_START..layout::USER_END;
        !ANYWHERE.contains(&address) || layout::is_user(address) && self.memory.direct(address).is_none()
    }

    /// Whether all of these addresses may be a program's: neither the kernel's memory nor what the monitor has among them.
    #[must_use]
    pub fn are_a_program_s(&self, address: u64, length: u64) -> bool {
        let Some(last) = address.checked_add(length.saturating_sub(1)) else { return false };
        let below = layout::USER_START..layout::THUNKS;
        let above = layout::DIRECT_MAP + self.memory.size()..layout::USER_END;
        [below, above].iter().any(|range| range.contains(&address) && range.contains(&last))
    }

    /// Whether the kernel uses a page of a program's, that runs in another process, for the first time since the address space
    /// was changed. Mapping it is only worth it for more.
    fn is_a_single_use(&mut self, address: u64) -> bool {
        let is_kernel = self.privilege() == Privilege::Kernel && layout::is_user(address);
        match &mut self.spaces {
            Some(spaces) if is_kernel => spaces.is_first_use(address & !(PAGE - 1)),
            _ => false,
        }
    }

    fn fill(&mut self, address: u64, access: Access) -> Result<(), Exception> {
        let found = self.translate(address, access, self.privilege())?;
        if self.memory.direct(address).is_some() || !layout::is_translated(address) {
            if self.privilege() == Privilege::User {
                return Err(Exception::PROTECTION);
            }
            if address < layout::USER_END {
                // A program's address that its process cannot have: the kernel takes this fault as one of the program's memory.
                return Err(Exception::page(0, layout::USER_END));
            }
            let why = format!("the guest cannot have the address {address:#x}");
            self.end(End::Broken, &why);
        }
        let page = address & !(PAGE - 1);
        let physical = found.physical & !(PAGE - 1);
        if !self.memory.contains(physical, PAGE) || self.apic.is_some() && physical == apic::BASE {
            return self.touch_device(found.physical);
        }
        if self.is_program_elsewhere()
            && let Some(spaces) = &mut self.spaces
        {
            spaces.map(&self.memory, self.vcpu.cr3, address, &found);
            return Ok(());
        }
        self.map_found(page, &found);
        Ok(())
    }

    /// Maps what a page that the guest translates leads to before it is used, if it leads to memory.
    pub(crate) fn fill_ahead(&mut self, address: u64, access: Access) {
        if !layout::is_translated(address) || self.memory.direct(address).is_some() {
            return;
        }
        let Ok(found) = self.translate(address, access, self.privilege()) else { return };
        let physical = found.physical & !(PAGE - 1);
        let is_controller = self.apic.is_some() && physical == apic::BASE;
        if self.memory.contains(physical, PAGE) && !is_controller {
            self.map_found(address & !(PAGE - 1), &found);
        }
    }

    fn map_found(&mut self, page: u64, found: &Translation) {
        let physical = found.physical & !(PAGE - 1);
        let rights = Rights { write: found.write, execute: found.execute };
        let size = found.size.min(2 << 20);
        let (aligned, whole) = (page & !(size - 1), found.physical & !(size - 1));
        let is_large = found.size > PAGE;
        let (start, from, length) = match is_large {
            true if self.memory.contains(whole, size) && self.memory.has_room(aligned, size) => {
                (aligned, whole, size)
            }
            true => (page, physical, PAGE),
            false => {
                let (before, after) = mmu::neighbours(&self.memory, found, NEIGHBOURS);
                (page - before * PAGE, physical - before * PAGE, (before + after) * PAGE)
            }
        };
        if is_large && layout::is_user(page) {
            self.programs.insert_large_page(page, found.size);
        }
        self.place(start, length, from, rights);
    }

    /// Maps a range, and keeps account of it.
    pub(crate) fn place(&mut self, start: u64, length: u64, physical: u64, rights: Rights) {
        self.map(start, length, physical, rights);
        let by_program = layout::is_user(start);
        if by_program {
            self.programs.insert(start, length, physical, rights);
        }
        if let Some(shadows) = &mut self.shadows {
            let how = match rights {
                Rights { write: true, .. } => Mapped::Writable { by_program },
                Rights { execute: true, .. } => Mapped::Code,
                _ => Mapped::Data,
            };
            shadows.range_mapped(&self.memory, start, physical..physical + length, how);
        }
    }

    /// Does an access to a device's registers in memory, which is not mapped for that.
    pub(crate) fn touch_device(&mut self, physical: u64) -> Result<(), Exception> {
        if self.ask_first(Request::Access(physical)) {
            return Ok(());
        }
        if self.perform_access(physical)?.is_none() {
            let rip = self.block().registers.rip.get();
            let why = format!(
                "the guest uses the physical address {physical:#x}, where it has nothing, at {rip:#x}"
            );
            self.end(End::Broken, &why);
        }
        Ok(())
    }

    fn map(&mut self, address: u64, length: u64, physical: u64, rights: Rights) {
        self.mapped += 1;
        if self.mapped > self.most_mapped {
            self.drop_all();
        }
        if self.memory.map(address, length, physical, rights).is_ok() {
            return;
        }
        self.drop_all();
        if let Err(error) = self.memory.map(address, length, physical, rights) {
            self.end(End::Broken, &format!("cannot map the guest's memory: {error}"));
        }
    }

    /// Delivers an exception or an interrupt as the processor would.
    pub fn inject(&mut self, exception: Exception) {
        self.step_was_left();
        if let Some(address) = exception.address {
            self.block().cr2.set(address);
        }
        if let Err(second) = self.deliver(exception) {
            let why = format!("the guest cannot take {exception:x?}: {second:x?}");
            self.end(End::Broken, &why);
        }
    }

    fn deliver(&mut self, exception: Exception) -> Result<(), Exception> {
        let at = u64::from(exception.vector) * 16;
        if at + 15 > u64::from(self.vcpu.idt.limit) {
            return Err(Exception::PROTECTION);
        }
        let low = self.read_long(self.vcpu.idt.base.wrapping_add(at))?;
        let high = self.read_long(self.vcpu.idt.base.wrapping_add(at + 8))?;
        if low >> 47 & 1 == 0 {
            return Err(Exception::PROTECTION);
        }
        let target = low & 0xFFFF | low >> 32 & 0xFFFF_0000 | high << 32;
        let from_user = self.privilege() == Privilege::User;
        let registers = &self.block().registers;
        let stack = match low >> 32 & 7 {
            0 if from_user => self.read_long(self.vcpu.task_base + 4)?,
            0 => registers.general[block::RSP].get(),
            list => self.read_long(self.vcpu.task_base + 0x24 + (list - 1) * 8)?,
        } & !15;
        let rip = self.visible(registers.rip.get());
        let words = [
            rip,
            u64::from(self.block().segments.get().cs),
            self.flags(),
            registers.general[block::RSP].get(),
            u64::from(self.block().segments.get().ss),
        ];
        let mut frame = Vec::with_capacity(48);
        frame.extend(exception.error.map(u64::from).iter().chain(&words).flat_map(|word| word.to_le_bytes()));
        let top = stack - frame.len() as u64;
        self.write(top, &frame)?;
        let is_trap = low >> 40 & 0xF == 0xF;
        self.set_flags(self.flags() & !(ALIGNMENT | PROGRAMS_OWN | if is_trap { 0 } else { IF }));
        registers.general[block::RSP].set(top);
        registers.rip.set(target);
        self.block().set_code_segment((low >> 16 & 0xFFFF) as u16);
        if from_user {
            self.block().set_stack_segment(0);
        }
        Ok(())
    }

    /// What the guest is to see of its instruction pointer.
    pub(crate) fn visible(&self, rip: u64) -> u64 {
        match (self.home, &self.shadows) {
            (Some(home), _) if home.is_first() => home.visible(rip),
            (_, Some(shadows)) => shadows.visible(rip),
            _ => rip,
        }
    }

    /// A program's system call.
    pub fn system_call(&mut self) {
        const LENGTH: u64 = 2;
        self.counters.system_calls += 1;
        self.rewrite(self.block().registers.rip.get().wrapping_sub(LENGTH));
        let flags = self.flags();
        let registers = &self.block().registers;
        registers.general[block::RCX].set(registers.rip.get());
        registers.general[block::R11].set(flags);
        registers.rip.set(self.block().lstar.get());
        self.block().segments.set(self.block().call_segments.get());
        self.set_flags(flags & !self.vcpu.syscall_mask);
    }

    /// Has a site rewritten if it is worth it, and a program cannot write there.
    fn rewrite(&mut self, site: u64) {
        let mask = VISIBLE | IF;
        let is_stepped = self.block().registers.rflags.get() & TRAP != 0;
        if is_stepped
            || self.shadows.is_none()
            || self.vcpu.syscall_mask & mask != mask
            || !layout::is_user(site)
        {
            return;
        }
        let Ok(found) = self.translate(site, Access::Execute, Privilege::User) else { return };
        if found.may_write || found.size != PAGE || !self.memory.contains(found.physical, 2) {
            return;
        }
        if let Some(shadows) = &mut self.shadows
            && shadows.trapped(&self.memory, site, found.physical)
        {
            let rights = Rights { write: false, execute: true };
            self.programs.insert(site & !(PAGE - 1), PAGE, found.physical & !(PAGE - 1), rights);
            self.mapped += 1;
        }
    }

    /// An instruction that there is not: if it lies below the jump of a rewritten site, the program goes on where it would have.
    pub fn resume_below_a_jump(&mut self) -> bool {
        let registers = &self.block().registers;
        let shadows = self.shadows.as_mut().filter(|_| layout::is_user(registers.rip.get()));
        let found = shadows.and_then(|shadows| shadows.below_a_jump(&self.memory, registers.rip.get()));
        if let Some(to) = found {
            registers.rip.set(to);
        }
        found.is_some()
    }

    /// A program was trapped: after an instruction, for it is stepped, or by INT1.
    pub fn debug_trap(&mut self, is_step: bool) {
        let rip = self.block().registers.rip.get();
        let visible = self.visible(rip);
        if is_step && visible != rip {
            // It has made the jump of a rewritten site, which it has not got.
            self.block().registers.rip.set(visible);
            return self.show_stepped_code();
        }
        self.vcpu.debug[6] = DEBUG_STATUS | if is_step { DEBUG_STEP } else { 0 };
        self.inject(Exception { vector: 1, error: None, address: None });
    }

    /// The kernel goes back to a program. If that is stepped, it gets its own code at the next instruction, not a copy with
    /// rewritten system calls: in what stands for these it must not be trapped.
    pub(crate) fn show_stepped_code(&mut self) {
        const LONGEST: u64 = 15;
        let registers = &self.block().registers;
        if registers.rflags.get() & TRAP == 0 || self.privilege() == Privilege::Kernel {
            return;
        }
        let Some(shadows) = &mut self.shadows else { return };
        let rip = registers.rip.get();
        for address in [rip, rip.wrapping_add(LONGEST - 1)] {
            shadows.show_original(&self.memory, address);
        }
    }

    /// A program has executed INT with this number, and the host has taken it for a system call of its own: does what the
    /// guest's processor would.
    pub fn software_interrupt(&mut self, vector: u8) {
        const LENGTH: u64 = 2;
        let gate = self.read_long(self.vcpu.idt.base.wrapping_add(u64::from(vector) * 16)).unwrap_or(0);
        let (is_present, privilege) = (gate >> 47 & 1 == 1, gate >> 45 & 3);
        if is_present && privilege == 3 {
            return self.inject(Exception { vector, error: None, address: None });
        }
        let rip = &self.block().registers.rip;
        rip.set(rip.get().wrapping_sub(LENGTH));
        // The gate's number, and that it is one of the table of gates.
        self.inject(Exception { error: Some(u32::from(vector) * 8 + 2), ..Exception::PROTECTION });
    }

    /// Something waits, and the guest is on its way back from a system call behind its look at that: it is back.
    pub fn finish_return(&mut self) {
        if self.returning.contains(&self.block().registers.rip.get()) {
            self.block().registers.general[block::RSP].set(self.block().scratch.get());
            self.system_return();
        }
    }

    fn exit(&mut self) {
        self.counters.exits += 1;
        let index = self.block().exit.get() as usize;
        let Some(exit) = self.exits.get(index).copied() else {
            self.end(End::Broken, &format!("a slot with the unknown number {index}"));
        };
        self.block().registers.rip.set(exit.resume);
        match exit.cause {
            Cause::Sensitive(instruction) => {
                if let Err(exception) = self.perform(&instruction) {
                    self.block().registers.rip.set(exit.original);
                    self.inject(exception);
                }
            }
            Cause::Uses(what) => self.use_program(what),
            Cause::Guarded => self.use_guarded(exit.original),
            Cause::Pending => {}
        }
        if self.home.is_some_and(|home| home.is_left()) {
            return;
        }
        if pending().load(Ordering::Acquire) != 0 && self.interruptible() {
            self.service();
        }
    }
}

/// Flags that a process can have, and that mean the same in it, for programs and the kernel.
pub const VISIBLE: u64 = 0x24_0CD5;

/// The block's byte.
#[must_use]
pub fn pending() -> &'static AtomicU8 {
    &block::get().pending
}

/// Returns true once the machine has begun to run.
pub(crate) fn is_there() -> bool {
    !MACHINE.load(Ordering::Acquire).is_null()
}

/// Returns this process' home, if address spaces have processes and this one is there for one of them.
#[must_use]
pub fn home() -> Option<Home> {
    HOME.get().copied()
}

/// The machine, while the guest does not run in this process. There is one at a time: whoever has it is the only one who uses the
/// machine.
#[derive(Debug)]
pub struct Turn(NonNull<Machine>);

impl Turn {
    /// Takes the machine. `None` if there is none yet, or the monitor uses it already: then a signal has interrupted the monitor.
    #[must_use]
    pub fn take() -> Option<Self> {
        let machine = NonNull::new(MACHINE.load(Ordering::Acquire))?;
        // The thread that runs the guest is the only one that comes here: an interruption leaves what it finds.
        if IN_USE.load(Ordering::Relaxed) {
            return None;
        }
        IN_USE.store(true, Ordering::Relaxed);
        Some(Self(machine))
    }

    /// Takes the machine where only a bug keeps it from being there.
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

/// Returns the flags that mean the same in the process: a program may have more of them than a kernel.
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

/// A slot has left the guest.
pub extern "C" fn handle_exit() {
    let mut machine = Turn::expect();
    machine.exit();
    machine.run_programs();
    machine.go_on();
}

/// The guest's kernel goes on with a program, and was not left by a slot.
pub extern "C" fn handle_program() {
    let mut machine = Turn::expect();
    machine.run_programs();
    machine.go_on();
}

/// Another processor has called, or something waits and the guest takes interrupts.
pub extern "C" fn handle_pending() {
    let mut machine = Turn::expect();
    machine.look();
    machine.go_on();
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::{block::Segments, devices::testing};

    /// Lets a test use a machine that has a block, memory and nothing else, with a descriptor table at its beginning.
    pub fn with_machine<T>(test: impl FnOnce(&mut Machine) -> T) -> T {
        testing::with_own_memory(|memory| {
            block::tests::ensure();
            let block = block::get();
            block.registers.general.iter().for_each(|register| register.set(0));
            block.flags.set(2);
            block.registers.rflags.set(2);
            block.segments.set(Segments::default());
            [&block.registers.rip, &block.gs, &block.gs_other].iter().for_each(|value| value.set(0));
            let mut machine = Machine {
                vcpu: Common::new(Vcpu::default()).unwrap(),
                other_registers: HashMap::new(),
                memory,
                devices: Bus::Absent,
                processor: None,
                apic: None,
                bringup: None,
                exits: Vec::new(),
                guards: Guards::default(),
                exit_jumps: Vec::new(),
                kernel_root: 0,
                counters: Common::new(Counters::default()).unwrap(),
                rewriting: Common::new(patched::Counters::default()).unwrap().share(),
                mapped: 0,
                programs: Mappings::default(),
                most_mapped: u64::MAX,
                shadows: None,
                spaces: None,
                home: None,
                returning: 0..0,
                debugger: None,
                faulted: None,
                verbose: false,
            };
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
