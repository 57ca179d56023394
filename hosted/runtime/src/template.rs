//! A saved machine from which clones begin ([`crate::memory::layers`]).
//!
//! A template has done what each start of the same machine does: its kernel is loaded, the saved machine is
//! checked, and its memory is in a file that nobody can write to. A clone is a copy of the template's process
//! (`fork`), which maps that memory and goes on from the saved state. So a clone reads no file and copies no
//! memory.

use std::{
    convert::Infallible,
    fs::File,
    ops::Range,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    error::{Error, Result},
    fork::{Image, Pair, Source},
    heap,
    loader::{self, Ready},
    memory::{Memory, disks::Disks, holes, layers::Run},
    process::{self, Fork},
    run::{self, DiskAccess, Isolation, Options, Prepared},
    sandbox,
    saved::{Life, Saved},
    thunks,
};

/// A saved machine that is ready to be cloned.
#[derive(Debug)]
pub struct Template {
    /// The saved machine.
    image: Arc<Image>,
    /// None in a clone, which has taken it.
    original: Option<Original>,
}

#[derive(Debug)]
struct Original {
    options: Options,
    ready: Ready,
    disks: Arc<Disks>,
    most_mapped: u64,
    clock_khz: u64,
}

/// The things from which a clone begins.
#[derive(Debug)]
pub struct Origin {
    pub image: Arc<Image>,
    /// The clone's own file, if pages of it are there already.
    pub own: Option<OwnedFd>,
    /// A file in the clone's folder, for lives of saved files that are void.
    pub mark: File,
    /// The life of the saved file that becomes void when the clone goes on.
    pub life: Option<Life>,
}

/// A machine that has begun as a clone.
#[derive(Debug)]
pub struct Started {
    /// The process number of the machine's first process.
    pub process: i32,
    /// The way to the machine, by which it can be forked.
    pub source: Source,
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
        let disks = Arc::new(Disks::open(&options.disks, &options.regions, options.memory)?);
        let memory = Memory::for_base(Arc::clone(&disks))?;
        let ready = loader::load(options, &memory)?;
        if ready.facts.generator.is_none() {
            return Err(Error::new(
                "the kernel's generator of random numbers is not known: its clones would make the same keys",
            )
            .hint("use a kernel from 5.18 on"));
        }
        let (state, changed) = run::fill(saved, &memory)?;
        let base = memory.into_base()?;
        // Large parts that were never used are a clone's own from the beginning.
        let holes = holes(base.as_raw_fd(), options.memory);
        let own = holes.into_iter().map(|pages| Run { pages, level: 1 });
        let runs = own.chain(without(&disks.runs(), &changed)).collect();
        let image = Arc::new(Image::with_state(vec![base], runs, disks.runs(), &state)?);
        let (options, clock_khz) = (options.clone(), run::clock_khz());
        // What all clones need is made once, in memory that they share.
        thunks::prepare_tables();
        heap::give_back();
        Ok(Self { image, original: Some(Original { options, ready, disks, most_mapped, clock_khz }) })
    }

    /// Checks that no other program writes to the images of disks in memory.
    ///
    /// # Errors
    /// If one wants to. It waits until this process and all clones have ended.
    pub fn check_disks(&self) -> Result<()> {
        self.original.as_ref().map_or(Ok(()), |original| original.disks.check())
    }

    /// Returns the images of disks in memory, and their inodes.
    #[must_use]
    pub fn images(&self) -> Vec<(PathBuf, u64)> {
        self.original.as_ref().map_or_else(Vec::new, |original| original.disks.images())
    }

    /// Returns true if machines have disks in memory, or regions.
    #[must_use]
    pub fn has_disks(&self) -> bool {
        self.original.as_ref().is_some_and(|original| !original.disks.is_empty())
    }

    /// Returns true if machines have a card on a subnet.
    #[must_use]
    pub fn has_subnet(&self) -> bool {
        self.original.as_ref().is_some_and(|original| original.options.subnet.is_some())
    }

    /// Returns the saved machine.
    #[must_use]
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Starts a clone of a machine: a process that is a copy of this one, which must have one thread. `begin`
    /// is called in the clone, and may change its options. All
    /// descriptors but the first three and `kept` are closed there. If the clone cannot start, it ends with
    /// the status that `failed` returns.
    ///
    /// # Errors
    /// If the host refuses a process or a socket.
    pub fn start(
        &mut self,
        origin: Origin,
        kept: RawFd,
        begin: impl FnOnce(&mut Options) -> Result<()>,
        failed: impl FnOnce(Error) -> i32,
    ) -> Result<Started> {
        let Origin { image, own, mark, life } = origin;
        let mut pair = Pair::new()?;
        pair.keep_mark(mark, life);
        match process::fork() {
            Fork::Parent(process) => Ok(Started { process, source: pair.into_source(process, image) }),
            Fork::Refused => Err(Error::system("start a process")
                .hint("the host limits your processes: end some machines, or raise ulimit -u")),
            Fork::Child => {
                let started = self.original.take().map_or_else(
                    || Err(Error::new("a clone has no template: this is a bug")),
                    |original| original.become_clone((&image, own), pair, kept, begin),
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
    if let Some(disk) = options.disks.iter().find(|disk| disk.access == DiskAccess::Write) {
        let path = disk.path.display();
        return Err(Error::new(format!("clones would all write to {path}"))
            .hint(format!("start the machine with --disk {path},private before you save it, or {path},ro")));
    }
    if options.control.is_some() || options.gdb.is_some() || options.cpus != 1 {
        return Err(Error::new("a clone has one processor, no gdb, and no socket of its own")
            .hint("leave out --control, --gdb and --cpus"));
    }
    Ok(())
}

/// Returns the parts of images that a saved machine has not changed. Both are in order.
fn without(images: &[Run], changed: &[Range<u64>]) -> Vec<Run> {
    let mut parts = Vec::new();
    for Run { pages, level } in images {
        let mut at = pages.start;
        for one in changed.iter().filter(|one| one.start < pages.end && one.end > pages.start) {
            parts.push(Run { pages: at..one.start.max(at), level: *level });
            at = at.max(one.end);
        }
        parts.push(Run { pages: at..pages.end.max(at), level: *level });
    }
    parts.retain(|part| !part.pages.is_empty());
    parts
}

impl Original {
    fn become_clone(
        mut self,
        (image, own): (&Image, Option<OwnedFd>),
        pair: Pair,
        kept: RawFd,
        begin: impl FnOnce(&mut Options) -> Result<()>,
    ) -> Result<Infallible> {
        begin(&mut self.options)?;
        let state = image.state().map_err(|error| {
            Error::new(format!("cannot read the state: {error}"))
                .hint("the host may have no memory: end a machine, or try again")
        })?;
        let link = pair.into_link();
        let files = image.files().iter().map(|file| file.as_raw_fd());
        let disks = Arc::new(self.disks.again()?);
        let kept = link.descriptors().chain([kept]).chain(disks.descriptors());
        let kept = kept.chain(own.as_ref().map(|own| own.as_raw_fd()));
        sandbox::keep_only(files.clone().chain(kept))?;
        let (size, pieces) = (disks.size(), run::most_pieces(self.most_mapped));
        let memory = Memory::over(files, size, image.runs(), disks, pieces, own)?;
        // Clones must not make the same keys.
        if let Some(generator) = self.ready.facts.generator {
            generator.reseed(&memory)?;
        }
        let prepared = Prepared {
            ready: self.ready,
            restored: Some(state),
            most_mapped: self.most_mapped / 2,
            clock_khz: self.clock_khz,
            link: Some(link),
        };
        run::launch(&self.options, memory, prepared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_pages_are_not_those_of_an_image() {
        let run = |start, end, level| Run { pages: start..end, level };
        let images = [run(100, 200, 7), run(300, 310, 8)];
        assert_eq!(without(&images, &[]), images);
        let changed = [90..101, 150..152, 152..153, 199..305, 310..320];
        assert_eq!(without(&images, &changed), [run(101, 150, 7), run(153, 199, 7), run(305, 310, 8)]);
        assert_eq!(without(&images, &[0..150, 150..500]), []);
    }
}
