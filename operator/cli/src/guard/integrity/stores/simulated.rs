//! A simulated machine, whose CPUs come and go, whose kernel stores, and whose snapshots begin, end and put
//! programs back, between any two passes. Everything may come before or after everything else.

use super::{Frames, Machine, News, Pages, Poking, Stores, tests};
use mercury_abi::{
    gate::IntegrityCall,
    shared::{LOG_RECORDS, READ_ONLY_LATER, READ_ONLY_NONE, SharedCpu},
};
use mercury_control::fake::shared_cpu;
use proptest::prelude::*;
use std::collections::BTreeSet;

const CPUS: usize = 2;
/// Pages of the kernel's, and of a module's that comes and goes.
const KERNEL: u64 = 0x20_0000;
const MODULE: u64 = 0x40_0000;

/// Tables that a CPU runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tables {
    /// All pages can be written.
    Base,
    /// Some pages are read-only.
    View,
    Snapshot,
}

/// Something that happens between two passes, or a pass.
#[derive(Clone, Copy, Debug)]
enum Event {
    Attach(usize),
    Detach(usize),
    /// A store of other code than the kernel's own.
    Store(usize, u64),
    /// Records of other kinds fill the log.
    Flood(usize),
    /// A module comes, or goes.
    Module,
    /// A snapshot begins, to which the machine may go back.
    Keep,
    /// The machine goes back to it.
    GoBack,
    /// The snapshot is dropped.
    Drop,
    /// The hypervisor is loaded anew.
    Reload,
    /// Another program takes the read-only pages away, or makes others read-only.
    OtherLeaves,
    OtherBegins,
    Pass,
    /// A pass in which this call of the driver fails.
    PassFails(u32),
}

const EVENTS: [Event; 19] = [
    Event::Attach(0),
    Event::Attach(1),
    Event::Detach(0),
    Event::Store(0, KERNEL),
    Event::Store(1, MODULE),
    Event::Flood(0),
    Event::Module,
    Event::Keep,
    Event::GoBack,
    Event::Drop,
    Event::Reload,
    Event::OtherLeaves,
    Event::OtherBegins,
    Event::Pass,
    Event::PassFails(0),
    Event::PassFails(1),
    Event::PassFails(3),
    Event::PassFails(4),
    Event::PassFails(6),
];

/// The hypervisor, and the kernel above it.
#[derive(Clone)]
struct Simulated {
    published: Vec<SharedCpu>,
    tables: [Tables; CPUS],
    /// Tables of CPUs that are attached from now on.
    root: Tables,
    /// Number of the pages, and the number while CPUs get the view.
    begun: u64,
    entered: u64,
    read_only: BTreeSet<u64>,
    has_module: bool,
    is_kept: bool,
    numbers: u64,
    /// Call that fails, from now on.
    fails: Option<u32>,
}

impl Simulated {
    fn new() -> Self {
        Self {
            published: (0..CPUS as u32).map(shared_cpu).collect(),
            tables: [Tables::Base; CPUS],
            root: Tables::Base,
            begun: 0,
            entered: READ_ONLY_NONE,
            read_only: BTreeSet::new(),
            has_module: false,
            is_kept: false,
            numbers: 1,
            fails: None,
        }
    }

    fn is_attached(&self, cpu: usize) -> bool {
        self.published[cpu].attached != 0
    }

    fn run_on(&mut self, cpu: usize, tables: Tables) {
        self.tables[cpu] = tables;
        let is_later = tables == Tables::Snapshot;
        self.published[cpu].read_only = if is_later { READ_ONLY_LATER } else { self.entered };
    }

    fn all(&mut self, tables: Tables) {
        for cpu in 0..CPUS {
            if self.is_attached(cpu) {
                self.run_on(cpu, tables);
            }
        }
    }

    fn names(&self) -> Vec<String> {
        let module = self.has_module.then(|| "some@7".to_owned());
        ["kernel".to_owned()].into_iter().chain(module).collect()
    }

    /// Makes a store. Returns true if the hypervisor has seen it.
    fn store(&mut self, cpu: usize, page: u64) -> bool {
        let is_seen =
            self.is_attached(cpu) && self.tables[cpu] == Tables::View && self.read_only.remove(&page);
        if is_seen {
            tests::store(&mut self.published[cpu], [page + 8, 1, 0, 0, 0]);
        }
        is_seen
    }
}

impl Machine for Simulated {
    fn published(&self) -> Vec<SharedCpu> {
        self.published.clone()
    }

    fn call(&mut self, cpu: u32, call: IntegrityCall, first: u64, second: u64) -> Result<(), String> {
        let cpu = cpu as usize;
        self.fails = match self.fails {
            Some(0) => return Err("busy".to_owned()),
            more => more.map(|more| more - 1),
        };
        if !self.is_attached(cpu) {
            return Err("unknown operation".to_owned());
        }
        match call {
            IntegrityCall::Begin => self.begun = second,
            IntegrityCall::Writer => {}
            IntegrityCall::Protect => self.read_only.extend((0..second).map(|page| first + page * 4096)),
            IntegrityCall::Enter => (self.root, self.entered) = (Tables::View, self.begun),
            IntegrityCall::Leave => (self.root, self.entered) = (Tables::Base, READ_ONLY_NONE),
        }
        let changes = matches!(call, IntegrityCall::Enter | IntegrityCall::Leave);
        if changes && self.tables[cpu] != Tables::Snapshot {
            self.run_on(cpu, self.root);
        }
        Ok(())
    }

    fn poking(&mut self) -> Result<Poking, String> {
        Ok(Poking { root: 0x1000, writers: vec![(1, 2)] })
    }

    fn frames(&mut self) -> Result<Frames, String> {
        let frames = [(KERNEL, "kernel"), (MODULE, "some@7")];
        let is_there = |(page, _): &(u64, &str)| *page == KERNEL || self.has_module;
        Ok(frames.into_iter().filter(is_there).map(|(page, part)| (page, (page, part.to_owned()))).collect())
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
}

/// A machine and the daemon in it.
#[derive(Clone)]
struct World {
    machine: Simulated,
    stores: Stores,
    /// The daemon, and the modules, at the instant of the snapshot.
    instant: Option<(Stores, bool)>,
    /// Number of stores to pages that the daemon has made read-only, since its last pass.
    made: u64,
}

impl World {
    fn new() -> Self {
        Self { machine: Simulated::new(), stores: Stores::default(), instant: None, made: 0 }
    }

    fn happens(&mut self, event: Event) {
        let machine = &mut self.machine;
        match event {
            Event::Attach(cpu) if !machine.is_attached(cpu) => {
                machine.published[cpu].attached = 1;
                // It says nothing of its pages yet.
                machine.tables[cpu] = machine.root;
            }
            Event::Detach(cpu) => {
                (machine.published[cpu].attached, machine.published[cpu].read_only) = (0, READ_ONLY_NONE);
            }
            Event::Store(cpu, page) => {
                let is_known = self.stores.frames.contains_key(&page);
                self.made += u64::from(machine.store(cpu, page) && is_known);
            }
            Event::Flood(cpu) => tests::flood(&mut machine.published[cpu], LOG_RECORDS + 2),
            Event::Module => machine.has_module ^= true,
            Event::Keep if !machine.is_kept => {
                machine.is_kept = true;
                machine.all(Tables::Snapshot);
                self.instant = Some((self.stores.clone(), machine.has_module));
            }
            Event::GoBack if machine.is_kept => {
                let (stores, has_module) = self.instant.clone().expect("an instant");
                (self.stores, machine.has_module) = (stores, has_module);
                // What the other life has stored is undone.
                self.made = 0;
            }
            Event::Drop if machine.is_kept => {
                machine.is_kept = false;
                machine.all(machine.root);
            }
            Event::Reload if !machine.is_kept => {
                let (has_module, numbers) = (machine.has_module, machine.numbers);
                self.machine = Simulated { has_module, numbers, ..Simulated::new() };
                self.made = 0;
            }
            Event::OtherLeaves => {
                (machine.root, machine.entered) = (Tables::Base, READ_ONLY_NONE);
                self.change_all();
            }
            Event::OtherBegins => {
                machine.begun = machine.number();
                (machine.root, machine.entered) = (Tables::View, machine.begun);
                self.change_all();
            }
            Event::Pass => self.pass(None),
            Event::PassFails(call) => self.pass(Some(call)),
            _ => {}
        }
    }

    /// Has all CPUs that are not beneath a snapshot run on the tables of the root.
    fn change_all(&mut self) {
        if !self.machine.is_kept {
            self.machine.all(self.machine.root);
        }
    }

    fn pass(&mut self, fails: Option<u32>) {
        self.machine.fails = fails;
        let news = self.stores.read(&self.machine.published());
        let told: u64 =
            news.iter().map(|news| if let News::Lost { stores, .. } = news { *stores } else { 1 }).sum();
        // A life that was put back hears again of what the other one has heard.
        assert!(told >= self.made, "{told} of {} stores are told", self.made);
        self.made = 0;
        let names = self.machine.names();
        let result = self.stores.follow_names(&mut self.machine, names);
        self.machine.fails = None;
        if result.is_ok() {
            self.is_guarded();
        }
        assert!(result.is_ok() == (self.stores.pages() > 0), "{result:?}");
    }

    /// Checks that no store of an attached CPU to code goes unseen.
    fn is_guarded(&mut self) {
        let frames = self.machine.frames().expect("pages");
        assert_eq!(self.stores.pages(), frames.len() as u64);
        assert!(frames.keys().all(|page| self.machine.read_only.contains(page)));
        for cpu in 0..CPUS {
            assert!(!self.machine.is_attached(cpu) || self.machine.tables[cpu] == Tables::View);
        }
    }

    /// Checks that a pass without a failure comes back to order, whatever was before.
    fn comes_back(mut self) {
        self.happens(Event::Drop);
        self.happens(Event::Attach(0));
        self.pass(None);
        self.is_guarded();
        assert!(matches!(self.stores.pages, Pages::ReadOnly { is_open: false, .. }));
    }
}

/// Has everything happen that may, `depth` times.
fn explore(world: &World, depth: u32) {
    for event in EVENTS {
        let mut world = world.clone();
        world.happens(event);
        if depth > 1 {
            explore(&world, depth - 1);
        } else {
            world.comes_back();
        }
    }
}

/// All orders of four events, from a machine whose pages are read-only.
#[test]
fn no_order_leaves_pages_open_that_count_as_read_only() {
    let mut world = World::new();
    for event in [Event::Module, Event::Attach(0), Event::Attach(1), Event::Pass] {
        world.happens(event);
    }
    explore(&world, 4);
}

#[test]
fn no_order_from_the_start_does_either() {
    explore(&World::new(), 3);
}

proptest! {
    #[test]
    fn no_long_life_does_either(events in prop::collection::vec(prop::sample::select(&EVENTS), 0..60)) {
        let mut world = World::new();
        events.into_iter().for_each(|event| world.happens(event));
        world.comes_back();
    }
}

/// Why nothing is seen is said in each pass, and not in the first one alone.
#[test]
fn a_reason_stays_as_long_as_it_holds() {
    let mut world = World::new();
    for event in [Event::Attach(0), Event::Keep, Event::Pass] {
        world.happens(event);
    }
    let follow = |world: &mut World| world.stores.follow_names(&mut world.machine, vec!["kernel".to_owned()]);
    for _ in 0..2 {
        assert_eq!(follow(&mut world), Err(super::LATER.to_owned()));
    }
    world.happens(Event::Drop);
    assert_eq!(follow(&mut world), Ok(()), "without another beginning");
    assert_eq!(world.machine.numbers, 2);
    world.machine.has_module = true;
    world.stores.parts.clear();
    // The call for the first page.
    world.machine.fails = Some(0);
    world.machine.published[0].read_only = 77;
    assert_eq!(follow(&mut world), Err("busy".to_owned()));
    assert_eq!(world.stores.pages(), 0);
    world.machine.fails = None;
    assert_eq!(follow(&mut world), Ok(()));
}

/// Pages for which there is no room stay writable, and each pass says so.
#[test]
fn missing_pages_are_told_in_each_pass() {
    let mut world = World::new();
    world.happens(Event::Attach(0));
    world.happens(Event::Pass);
    let Pages::ReadOnly { missing, .. } = &mut world.stores.pages else { panic!("no pages") };
    *missing = Some("no room".to_owned());
    for _ in 0..2 {
        let names = world.machine.names();
        let result = world.stores.follow_names(&mut world.machine, names);
        assert_eq!((result, world.stores.pages()), (Err("no room".to_owned()), 1));
    }
}
