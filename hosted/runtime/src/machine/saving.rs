//! The state of the machine as bytes, and the machine from them ([`crate::saved`]).

use std::{
    cell::Cell,
    ptr, slice,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use mercury_devices::state::{Reader, Writer};

use super::{End, Machine, pending};
use crate::{
    block::{Block, Segments},
    control::Control,
    cpuid,
    error::{Error, Result},
    fork::Link,
    saved::{self, Facts},
    selectors, signal,
    vcpu::{Table, Vcpu},
};

/// Time for the host to answer the requests that it has, before a machine is saved.
const DRAIN_AT_MOST: Duration = Duration::from_secs(20);

/// The parts of the first process by which the machine is saved and forked.
#[derive(Debug)]
pub struct Saving {
    /// The socket of the person who may ask for it.
    pub control: Option<Control>,
    /// The socket of the template that may fork it.
    pub link: Option<Link>,
    pub facts: Facts,
}

impl Machine {
    /// Saves the machine if a person has asked for it, and ends it when the person has all of it. The guest
    /// has been left by a slot, so all of its registers are in memory.
    pub(crate) fn save_if_wanted(&mut self) {
        let Some(Saving { control: Some(control), facts, .. }) = &self.saving else { return };
        let (Some(wanted), life, facts) = (control.wanted(), control.life(), *facts) else { return };
        if let Err(why) = self.can_be_saved() {
            return wanted.refuse(why);
        }
        if self.devices.own().is_some_and(|devices| !devices.drain(DRAIN_AT_MOST)) {
            return wanted.refuse("a disk of the machine does not answer: try again when it does");
        }
        let state = self.save_state(&facts);
        if wanted.send(|to| saved::write(to, &life, &state, &self.memory)) {
            self.end(End::Ended, "saved");
        }
        // Nobody has kept it, so the guest goes on.
    }

    /// Gives the machine as it is to its template, if that has asked for it. The guest has been left by a
    /// slot, and goes on.
    pub(crate) fn fork_if_wanted(&mut self) {
        /// Time for the host to answer requests of disks. The template waits for longer.
        const DRAIN: Duration = Duration::from_secs(2);
        if !signal::may_be_forked() {
            return;
        }
        let Some(Saving { link: Some(link), facts, .. }) = &self.saving else { return };
        let (facts, start) = (*facts, Instant::now());
        let Some(wanted) = link.wanted() else { return };
        let taken = self.can_be_saved().and_then(|()| {
            if self.devices.own().is_some_and(|devices| !devices.drain(DRAIN)) {
                return Err("a disk of the machine does not answer: try again when it does");
            }
            let state = self.save_state(&facts);
            let layers = self.memory.layers().ok_or("the machine has no layers: this is a bug")?;
            Ok((layers.freeze()?, state))
        });
        if taken.is_ok() {
            if let Some(space) = self.placement.per_space() {
                space.have_all_follow();
            }
            self.follow();
        }
        let Some(Saving { link: Some(link), .. }) = &self.saving else { return };
        match taken {
            Ok((frozen, state)) => link.send(wanted, &frozen, &state, start.elapsed()),
            Err(why) => link.refuse(wanted, why),
        }
    }

    /// Goes on from a saved state in the process that shows all address spaces, or has the kernel.
    pub(super) fn begin_restored(&mut self) {
        if self.is_restored {
            selectors::load(self.block().data.get());
            self.run_programs();
        }
    }

    fn can_be_saved(&mut self) -> std::result::Result<(), &'static str> {
        if self.local.is_some() {
            return Err("a machine with several processors cannot be saved yet");
        }
        self.devices.own().map(|_| ()).ok_or("this process has no devices: this is a bug")
    }

    fn save_state(&mut self, facts: &Facts) -> Vec<u8> {
        let mut to = Writer::default();
        facts.save(&mut to);
        save_block(self.block(), self.visible(self.block().registers.rip.get()), &mut to);
        let data =
            if self.placement.per_space().is_some() { self.block().data.get() } else { selectors::read() };
        to.numbers(data);
        to.bytes(&extended(self.block()));
        save_vcpu(&self.vcpu, &mut to);
        to.number(self.other_registers.len() as u64);
        self.other_registers.iter().for_each(|(number, value)| to.numbers([u64::from(*number), *value]));
        if let Some(devices) = self.devices.own() {
            devices.save(&mut to);
        }
        to.finish()
    }

    /// Takes a saved state. Its memory is there already.
    ///
    /// # Errors
    /// If it is that of another kind of machine, or of another host.
    pub fn load_state(&mut self, state: &[u8]) -> Result<()> {
        let mut from = Reader::new(state);
        if let Some(saving) = &self.saving {
            saving.facts.compare(&mut from)?;
        }
        load_block(self.block(), &mut from)?;
        let mut data = [0; 4];
        for selector in &mut data {
            *selector = from.number()?;
        }
        self.block().data.set(data);
        set_extended(self.block(), from.bytes()?)?;
        *self.vcpu = load_vcpu(&mut from)?;
        self.route_system_returns();
        let count: u64 = from.number()?;
        for _ in 0..count {
            let (number, value) = (from.number()?, from.number()?);
            self.other_registers.insert(number, value);
        }
        if let Some(devices) = self.devices.own() {
            devices.load(&mut from)?;
        }
        self.is_restored = true;
        pending().store(1, Ordering::Release);
        from.finish()
    }
}

fn save_block(block: &Block, rip: u64, to: &mut Writer) {
    to.numbers(block.registers.values());
    to.numbers([rip, block.registers.rflags.get(), block.flags.get()]);
    to.numbers(
        [&block.fs, &block.gs, &block.gs_other, &block.scratch, &block.cr2, &block.lstar]
            .map(|one| one.get()),
    );
    for segments in [&block.segments, &block.call_segments, &block.return_segments] {
        to.numbers([segments.get().cs, segments.get().ss]);
    }
    to.numbers(block.small_stack.iter().map(Cell::get));
}

fn load_block(block: &Block, from: &mut Reader<'_>) -> Result<()> {
    for register in &block.registers.general {
        register.set(from.number()?);
    }
    for field in [
        &block.registers.rip,
        &block.registers.rflags,
        &block.flags,
        &block.fs,
        &block.gs,
        &block.gs_other,
        &block.scratch,
        &block.cr2,
        &block.lstar,
    ] {
        field.set(from.number()?);
    }
    for segments in [&block.segments, &block.call_segments, &block.return_segments] {
        segments.set(Segments { cs: from.number()?, ss: from.number()? });
    }
    for word in &block.small_stack {
        word.set(from.number()?);
    }
    Ok(())
}

/// Returns the floating-point registers.
fn extended(block: &Block) -> Vec<u8> {
    let from = ptr::with_exposed_provenance::<u8>(block.extended.get() as usize);
    // SAFETY: The area is as large, is mapped for ever, and nothing changes it while the guest does not run.
    unsafe { slice::from_raw_parts(from, cpuid::extended_size() as usize) }.to_vec()
}

fn set_extended(block: &Block, bytes: &[u8]) -> Result<()> {
    if bytes.len() != cpuid::extended_size() as usize {
        return Err(Error::host("this host's processor has other registers than the saved machine's"));
    }
    let to = ptr::with_exposed_provenance_mut::<u8>(block.extended.get() as usize);
    // SAFETY: As above. The processor checks what it loads from there: it is a saved machine's.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    Ok(())
}

fn save_vcpu(vcpu: &Vcpu, to: &mut Writer) {
    to.numbers([vcpu.cr0, vcpu.cr3, vcpu.cr4, vcpu.cr8]);
    to.numbers(vcpu.debug);
    for table in [vcpu.gdt, vcpu.idt] {
        to.numbers([table.base, table.limit.into()]);
    }
    to.numbers([vcpu.ldt, vcpu.task]);
    to.numbers([vcpu.task_base, vcpu.star, vcpu.syscall_mask, vcpu.efer, vcpu.xcr0]);
}

fn load_vcpu(from: &mut Reader<'_>) -> Result<Vcpu> {
    let mut vcpu = Vcpu::default();
    for register in [&mut vcpu.cr0, &mut vcpu.cr3, &mut vcpu.cr4, &mut vcpu.cr8] {
        *register = from.number()?;
    }
    for register in &mut vcpu.debug {
        *register = from.number()?;
    }
    for table in [&mut vcpu.gdt, &mut vcpu.idt] {
        *table = Table { base: from.number()?, limit: from.number()? };
    }
    (vcpu.ldt, vcpu.task) = (from.number()?, from.number()?);
    for register in
        [&mut vcpu.task_base, &mut vcpu.star, &mut vcpu.syscall_mask, &mut vcpu.efer, &mut vcpu.xcr0]
    {
        *register = from.number()?;
    }
    Ok(vcpu)
}
