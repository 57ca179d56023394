//! The state of the machine as bytes, and the machine from them ([`crate::saved`]).

use std::{
    cell::Cell,
    ptr, slice,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use mercury_devices::state::{self, Reader};

use super::{End, Machine, layered::Writer, pending};
use crate::{
    block::{Block, Segments},
    control::Control,
    cpuid,
    error::{Error, Result},
    fork::{AT_WORK, Link, Wanted, What, Work},
    saved::{self, Facts},
    selectors, signal,
    throttle::Words,
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
    /// The words that the template shares, if there is one.
    pub words: &'static Words,
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

    /// Does what the machine's template has asked for. The guest has been left by a slot, and goes on. `work`
    /// says if it waits for an interrupt. A machine that has as much memory as its template lets it have stands
    /// still, unless it waits anyway.
    pub(crate) fn obey_template(&mut self, work: Work) {
        self.answer_template(work);
        if work == Work::Any && self.saving.as_ref().is_some_and(|saving| saving.words.is_limited()) {
            self.await_memory();
        }
    }

    /// Stands still while the machine is above its limit ([`crate::throttle`]). Meanwhile it answers its
    /// template, and takes keys: one may end it.
    #[cold]
    #[inline(never)]
    fn await_memory(&mut self) {
        let (Some(layers), Some(words)) =
            (self.memory.layers(), self.saving.as_ref().map(|saving| saving.words))
        else {
            return;
        };
        if !words.holds(layers.used()) {
            return;
        }
        words.set_waits(true);
        let mut is_called = false;
        while words.holds(layers.used())
            && !signal::is_end_wanted()
            && !signal::is_child_gone()
            && self.devices.ended().is_none()
        {
            if !self.link().is_some_and(Link::wait) {
                // The template has ended.
                words.lift();
                break;
            }
            self.answer_template(Work::Any);
            if pending().swap(0, Ordering::AcqRel) != 0 {
                is_called = true;
                self.devices.poll();
            }
        }
        words.set_waits(false);
        if is_called {
            // Interrupts have come meanwhile.
            pending().store(1, Ordering::Release);
        }
    }

    fn answer_template(&mut self, work: Work) {
        if !signal::may_be_forked() {
            return;
        }
        for wanted in self.link().map(Link::wanted).unwrap_or_default() {
            match wanted.what {
                What::Freeze | What::Hold(..) => self.fork(wanted, work),
                What::Balloon(pages) => self.set_balloon(pages),
                What::Trim(from) => self.trim(wanted, from),
            }
        }
    }

    fn link(&self) -> Option<&Link> {
        self.saving.as_ref()?.link.as_ref()
    }

    /// Gives the machine as it is to its template. If it is to be held, it stands still until the template
    /// has decided.
    fn fork(&mut self, wanted: Wanted, work: Work) {
        /// Time for the host to answer requests of disks. The template waits for longer.
        const DRAIN: Duration = Duration::from_secs(2);
        let Some(facts) = self.saving.as_ref().map(|saving| saving.facts) else { return };
        let (start, is_held) = (Instant::now(), matches!(wanted.what, What::Hold(..)));
        let must_be_idle = matches!(wanted.what, What::Hold(_, Work::Idle));
        let taken = self.can_be_saved().and_then(|()| {
            if let Some(devices) = self.devices.own() {
                if is_held && !devices.console.pause() {
                    return Err("the machine's console does not stand still: try again");
                }
                if must_be_idle && (work != Work::Idle || !devices.console.typed().is_empty()) {
                    return Err(AT_WORK);
                }
                if !devices.drain(DRAIN) {
                    return Err("a disk of the machine does not answer: try again when it does");
                }
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
        let Some(link) = self.link() else { return };
        let is_sent = taken.is_ok();
        match taken {
            Ok((frozen, state)) => link.send(wanted, &frozen, &state, start.elapsed()),
            Err(why) => link.refuse(wanted, why),
        }
        // A child that is gone is seen when the machine goes on: the file may be all that is left of it.
        if is_held && is_sent && link.await_end(wanted, signal::is_end_wanted) {
            self.end(End::Ended, "the machine is asleep, in a file");
        }
        if let Some(devices) = self.devices.own().filter(|_| is_held) {
            devices.console.go_on();
        }
    }

    /// Tells the guest's kernel how much memory the host wants to have.
    fn set_balloon(&mut self, pages: u32) {
        if let Some(devices) = self.devices.own() {
            devices.set_balloon(pages);
            pending().store(1, Ordering::Release);
        }
    }

    /// Removes pages of zeros from the machine's own file, as many as are looked at in a moment.
    fn trim(&mut self, wanted: Wanted, from: u64) {
        self.catch_up_with_layers(Writer::Any);
        let (next, removed) = self.memory.layers().map_or((u64::MAX, 0), |layers| layers.trim(from));
        if let Some(link) = self.link() {
            link.trimmed(wanted, next, removed);
        }
    }

    /// Says that the machine goes on here, and not in the file from which it began. If that cannot be said,
    /// the machine ends, and its file counts.
    pub(super) fn leave_file(&mut self) {
        if let Some(Err(error)) = self.link().map(Link::begin) {
            let why = format!("the machine stays in its file: its folder cannot be written to ({error})");
            self.end(End::Ended, &why);
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
        let mut to = state::Writer::default();
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

fn save_block(block: &Block, rip: u64, to: &mut state::Writer) {
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

fn save_vcpu(vcpu: &Vcpu, to: &mut state::Writer) {
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
