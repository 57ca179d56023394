//! A saved machine from which clones begin ([`crate::memory::layers`]).
//!
//! A template has done what each start of the same machine does: its kernel is loaded, the saved machine is
//! checked, and its memory is in a file that nobody can write to. A clone is a copy of the template's process
//! (`fork`), which maps that memory and goes on from the saved state. So a clone reads no file and copies no
//! memory.

use std::{
    convert::Infallible,
    ops::Range,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::Path,
};

use crate::{
    error::{Error, Result},
    heap,
    layout::PAGE,
    loader::{self, Ready},
    memory::Memory,
    process::{self, Fork},
    run::{self, Isolation, Options, Prepared},
    sandbox,
    saved::Saved,
    thunks,
};

/// Holes of the base with at least so many pages are a clone's own from the beginning.
const LEAST_HOLE: u64 = 64;
/// The largest number of such holes.
const MOST_HOLES: usize = 64;
/// Each piece of own pages splits the direct map and the window twice. So many of the mappings that the host
/// allows are for each piece, with a reserve for programs.
const MAPPINGS_PER_PIECE: u64 = 8;

/// A saved machine that is ready to be cloned.
#[derive(Debug)]
pub struct Template {
    /// None in a clone, which has taken it.
    original: Option<Original>,
}

#[derive(Debug)]
struct Original {
    options: Options,
    base: OwnedFd,
    /// The pages of large holes in the base.
    holes: Vec<Range<u64>>,
    ready: Ready,
    state: Vec<u8>,
    most_mapped: u64,
    clock_khz: u64,
}

impl Template {
    /// Loads the kernel, and takes the saved machine.
    ///
    /// # Errors
    /// If the file is damaged or the host does not have what the machine needs.
    pub fn new(options: &Options, saved: &Path) -> Result<Self> {
        can_be_cloned(options)?;
        let most_mapped = run::begin(options)?;
        let saved = Saved::open(saved)?;
        run::check_memory(options)?;
        let memory = Memory::for_base(options.memory)?;
        let ready = loader::load(options, &memory)?;
        if ready.facts.generator.is_none() {
            return Err(Error::new(
                "the kernel's generator of random numbers is not known: its clones would make the same keys",
            )
            .hint("use a kernel from 5.18 on"));
        }
        let state = run::fill(saved, &memory)?;
        let base = memory.into_base()?;
        let holes = holes(base.as_raw_fd(), options.memory);
        let (options, clock_khz) = (options.clone(), run::clock_khz());
        // What all clones need is made once, in memory that they share.
        thunks::prepare_tables();
        heap::give_back();
        let original = Some(Original { options, base, holes, ready, state, most_mapped, clock_khz });
        Ok(Self { original })
    }

    /// Starts a clone: a process that is a copy of this one, which must have one thread. `begin` is called in
    /// the clone, and may change its options. All descriptors but the first three and `kept` are closed
    /// there. If the clone cannot start, it ends with the status that `failed` returns. Returns the clone's
    /// process number.
    ///
    /// # Errors
    /// If the host refuses a process.
    pub fn start(
        &mut self,
        kept: RawFd,
        begin: impl FnOnce(&mut Options) -> Result<()>,
        failed: impl FnOnce(Error) -> i32,
    ) -> Result<i32> {
        match process::fork() {
            Fork::Parent(pid) => Ok(pid),
            Fork::Refused => Err(Error::system("start a process")
                .hint("the host limits your processes: end some machines, or raise ulimit -u")),
            Fork::Child => {
                let started = self.original.take().map_or_else(
                    || Err(Error::new("a clone has no template: this is a bug")),
                    |original| original.become_clone(kept, begin),
                );
                let status = match started {
                    Ok(never) => match never {},
                    Err(error) => failed(error),
                };
                // SAFETY: It ends the process, without the destructors of the template's values.
                unsafe { libc::_exit(status) }
            }
        }
    }
}

/// Checks that machines with these options can be clones.
fn can_be_cloned(options: &Options) -> Result<()> {
    if options.isolation == Isolation::Process {
        return Err(Error::new("machines with --isolation=process cannot be cloned yet")
            .hint("save a machine that was started without --isolation"));
    }
    if let Some(disk) = options.disks.iter().find(|disk| !disk.read_only) {
        let path = disk.path.display();
        return Err(Error::new(format!("clones would all write to {path}"))
            .hint(format!("start the machine with --disk {path},ro before you save it")));
    }
    if options.subnet.is_some() {
        return Err(Error::new("clones would all have one address on their subnet")
            .hint("leave out --net subnet, and save a machine without it"));
    }
    if options.control.is_some() || options.gdb.is_some() || options.cpus != 1 {
        return Err(Error::new("a clone has one processor, no gdb, and no socket of its own")
            .hint("leave out --control, --gdb and --cpus"));
    }
    Ok(())
}

impl Original {
    fn become_clone(
        mut self,
        kept: RawFd,
        begin: impl FnOnce(&mut Options) -> Result<()>,
    ) -> Result<Infallible> {
        begin(&mut self.options)?;
        sandbox::keep_only([self.base.as_raw_fd(), kept].into_iter())?;
        let most_pieces = u32::try_from(self.most_mapped / MAPPINGS_PER_PIECE).unwrap_or(u32::MAX);
        let memory = Memory::over(self.base, self.options.memory, &self.holes, most_pieces)?;
        // Clones must not make the same keys.
        if let Some(generator) = self.ready.facts.generator {
            generator.reseed(&memory)?;
        }
        let prepared = Prepared {
            ready: self.ready,
            restored: Some(self.state),
            most_mapped: self.most_mapped / 2,
            clock_khz: self.clock_khz,
        };
        run::launch(&self.options, memory, prepared)
    }
}

/// Returns the pages of the largest holes of a file, in order.
fn holes(file: RawFd, size: u64) -> Vec<Range<u64>> {
    // SAFETY: It takes a descriptor and numbers.
    let seek = |at: u64, what| u64::try_from(unsafe { libc::lseek(file, at.cast_signed(), what) }).ok();
    let mut found = Vec::new();
    let mut at = 0;
    while at < size {
        let start = seek(at, libc::SEEK_HOLE).unwrap_or(size);
        // There is no data after the last hole.
        let end = seek(start, libc::SEEK_DATA).unwrap_or(size).min(size);
        found.push(start.div_ceil(PAGE)..end / PAGE);
        at = end.max(at + PAGE);
    }
    found.retain(|hole| hole.end >= hole.start + LEAST_HOLE);
    found.sort_by_key(|hole| std::cmp::Reverse(hole.end - hole.start));
    found.truncate(MOST_HOLES);
    found.sort_by_key(|hole| hole.start);
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use super::*;
    use crate::memory::new_file;

    #[test]
    fn large_holes_are_found() {
        const SIZE: u64 = 1000 * PAGE;
        let file = File::from(new_file(c"test", SIZE, 0).unwrap());
        assert_eq!(holes(file.as_raw_fd(), SIZE), std::iter::once(0..1000).collect::<Vec<_>>());
        for page in [10, 11, 80, 500, 999] {
            file.write_all_at(&[1], page * PAGE + 7).unwrap();
        }
        assert_eq!(holes(file.as_raw_fd(), SIZE), [12..80, 81..500, 501..999]);
        file.write_all_at(&vec![1; SIZE as usize], 0).unwrap();
        assert!(holes(file.as_raw_fd(), SIZE).is_empty());
    }
}
