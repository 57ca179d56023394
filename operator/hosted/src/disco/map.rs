//! `mercury disco map`: the memory that machines share, and what each has for itself.
//!
//! Two accounts are shown. The first one is Mercury's: the pages of the memory that a template shares, once,
//! and the pages of each machine's own files. A template shares the saved machine's memory, and that of
//! machines that were forked, as it was then. The second account is the host's kernel's: the proportional
//! set size (PSS) of all processes of a machine, in which a page that several processes map counts for each
//! in part (`proc_pid_smaps(5)`). The image of a disk in memory is in the host's page cache, once.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

use mercury_control::{
    error::Result,
    output::{Render, Text},
};
use mercury_guests::Name;
use mercury_hosted::{
    fork::{BALLOON_FILE, read_balloon},
    memory::disks::cached,
};
use serde::Serialize;

use super::{
    client::unreadable,
    folder::{Folder, MachineStatus, TemplateStatus},
};

/// The names of the memory files, as `/proc` shows them.
const NAMES: [&str; 2] = ["/memfd:mercury-hosted (deleted)", "/memfd:mercury-base (deleted)"];
/// The name of a region's file.
const REGION: &str = "/memfd:mercury-region (deleted)";
/// The index of a saved machine's memory among them.
const BASE: usize = 1;
/// The size of a block of a file's size on the disk.
const BLOCK: u64 = 512;

/// A file of guests' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Open {
    bytes: u64,
    /// True for the memory of a saved machine.
    is_base: bool,
}

/// The files of guests' memory that a process has open, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files(HashMap<u64, Open>);

impl Files {
    /// Returns the files of a process. Returns nothing if they are not known.
    pub fn of(pid: u32) -> Option<Self> {
        let mut files = HashMap::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
            let Ok(name) = fs::read_link(entry.path()) else { continue };
            let Some(kind) = NAMES.iter().position(|known| *name.to_string_lossy() == **known) else {
                continue;
            };
            if let Ok(file) = fs::metadata(entry.path()) {
                files.insert(file.ino(), Open { bytes: file.blocks() * BLOCK, is_base: kind == BASE });
            }
        }
        Some(Self(files))
    }

    /// Returns the numbers of these files.
    pub fn numbers(&self) -> HashSet<u64> {
        self.0.keys().copied().collect()
    }

    /// Returns the size of all of these files.
    pub fn bytes(&self) -> u64 {
        self.0.values().map(|file| file.bytes).sum()
    }

    /// Returns those that are not among others.
    pub fn without(mut self, others: &HashSet<u64>) -> Self {
        self.0.retain(|file, _| !others.contains(file));
        self
    }
}

/// Returns the size of the balloon of a machine by its first process: as it is wanted, and as it is, in
/// bytes.
pub fn balloon(pid: u32) -> Option<[u64; 2]> {
    const PAGE: u64 = 4096;
    let is_balloon = |path: &PathBuf| fs::read_link(path).is_ok_and(|name| name.as_os_str() == BALLOON_FILE);
    let mut files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten().map(|entry| entry.path());
    let file = fs::File::open(files.find(is_balloon)?).ok()?;
    let (wanted, actual) = read_balloon(&file).ok()?;
    Some([wanted, actual].map(|pages| u64::from(pages) * PAGE))
}

/// Returns the numbers of the files that machines share: those of saved machines, of templates, and those
/// that several machines have. A machine whose template has ended shares them all the same.
pub fn shared(templates: &[TemplateStatus], machines: &[MachineStatus]) -> HashSet<u64> {
    let of_templates: Vec<Files> = templates.iter().filter_map(|one| Files::of(one.pid)).collect();
    let of_machines: Vec<Files> = machines.iter().filter_map(|one| Files::of(one.pid)).collect();
    shared_of(&of_templates, &of_machines)
}

fn shared_of(templates: &[Files], machines: &[Files]) -> HashSet<u64> {
    let mut shared: HashSet<u64> = templates.iter().flat_map(|files| files.0.keys().copied()).collect();
    let mut seen = HashSet::new();
    for (number, file) in machines.iter().flat_map(|files| &files.0) {
        if file.is_base || !seen.insert(*number) {
            shared.insert(*number);
        }
    }
    shared
}

/// What the host's kernel counts for the processes of a machine: proportional set sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Counted {
    base_bytes: u64,
    own_bytes: u64,
    /// The images of disks in memory.
    image_bytes: u64,
    /// Regions, which machines of other templates may have mapped, too.
    region_bytes: u64,
    /// All else: the monitor.
    monitor_bytes: u64,
}

impl Counted {
    /// Adds the mappings of a process, from the text of its `smaps`. The files with these numbers are shared,
    /// and those are images of disks.
    fn add(&mut self, smaps: &str, shared: &HashSet<u64>, images: &HashSet<u64>) {
        let mut to = &mut self.monitor_bytes;
        for line in smaps.lines() {
            if let Some(pss) = line.strip_prefix("Pss:") {
                let kib: u64 = pss.trim().trim_end_matches(" kB").parse().unwrap_or(0);
                *to += kib << 10;
            } else if line.split(' ').next().is_some_and(|range| range.contains('-')) {
                let file = line.split_whitespace().nth(4).and_then(|file| file.parse().ok());
                let is_memory = NAMES.iter().any(|name| line.ends_with(name));
                // Only memory is shared with the file: the program's own code is mapped privately.
                let is_image = line.split(' ').nth(1).is_some_and(|rights| rights.ends_with('s'));
                to = match file.filter(|_| is_memory) {
                    None if line.ends_with(REGION) => &mut self.region_bytes,
                    None if is_image && file.is_some_and(|file| images.contains(&file)) => {
                        &mut self.image_bytes
                    }
                    Some(file) if shared.contains(&file) => &mut self.base_bytes,
                    Some(_) => &mut self.own_bytes,
                    None => &mut self.monitor_bytes,
                };
            }
        }
    }
}

/// The parent of each process of the host.
fn parents() -> HashMap<u32, Vec<u32>> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The name before may contain anything but ends with the last parenthesis.
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    children
}

/// The account of a template.
#[derive(Debug, Serialize)]
struct TemplateMemory {
    template: Name,
    /// The memory that the template shares, which exists once.
    base_bytes: u64,
    file: PathBuf,
}

/// The account of the image of a disk in memory.
#[derive(Debug, Serialize)]
struct ImageMemory {
    file: PathBuf,
    /// Its pages in the host's page cache, which exist once. Not known if the host does not say so.
    cached_bytes: Option<u64>,
}

/// The account of a machine.
#[derive(Debug, Serialize)]
struct MachineMemory {
    machine: Name,
    template: Name,
    /// The pages of its own.
    own_bytes: u64,
    /// The memory that its kernel has given to the host by the balloon.
    balloon_bytes: u64,
    /// The number of its processes.
    processes: usize,
    /// What the host's kernel counts.
    pss: Counted,
}

/// The memory of all templates and machines.
#[derive(Debug, Serialize)]
pub struct Map {
    templates: Vec<TemplateMemory>,
    images: Vec<ImageMemory>,
    machines: Vec<MachineMemory>,
    /// The guests' memory by Mercury's account: each template once, and each machine's own pages.
    guest_bytes: u64,
    /// The same by the host's kernel's: what mappings count for it. Pages that nobody maps count nowhere.
    pss_guest_bytes: u64,
    /// The pages of images that are mapped, by the host's kernel's account.
    pss_image_bytes: u64,
    /// The pages of regions that are mapped, by the same account: the part of these machines.
    pss_region_bytes: u64,
    pss_monitor_bytes: u64,
}

/// Reads the accounts.
pub fn map() -> Result<Map> {
    let (folder, machines) = (Folder::templates(), Folder::machines());
    let templates: Vec<TemplateStatus> = folder.living().map_err(|error| unreadable(&folder, &error))?;
    let machines: Vec<MachineStatus> = machines.living().map_err(|error| unreadable(&machines, &error))?;
    let children = parents();
    let shared = shared(&templates, &machines);
    let images: BTreeMap<PathBuf, u64> = templates
        .iter()
        .flat_map(|one| &one.images)
        .chain(machines.iter().flat_map(|one| &one.images))
        .map(|image| (image.file.clone(), image.inode))
        .collect();
    let inodes: HashSet<u64> = images.values().copied().collect();
    let machines: Vec<MachineMemory> =
        machines.into_iter().map(|one| account(one, &children, &shared, &inodes)).collect();
    let templates: Vec<TemplateMemory> = templates
        .into_iter()
        .map(|one| TemplateMemory {
            template: one.name,
            base_bytes: Files::of(one.pid).unwrap_or_default().bytes(),
            file: one.file,
        })
        .collect();
    let own: u64 = machines.iter().map(|machine| machine.own_bytes).sum();
    Ok(Map {
        guest_bytes: own + templates.iter().map(|one| one.base_bytes).sum::<u64>(),
        pss_guest_bytes: machines.iter().map(|one| one.pss.base_bytes + one.pss.own_bytes).sum(),
        pss_image_bytes: machines.iter().map(|one| one.pss.image_bytes).sum(),
        pss_region_bytes: machines.iter().map(|one| one.pss.region_bytes).sum(),
        images: images
            .into_keys()
            .map(|file| ImageMemory { cached_bytes: cached(&file).ok(), file })
            .collect(),
        pss_monitor_bytes: machines.iter().map(|one| one.pss.monitor_bytes).sum(),
        templates,
        machines,
    })
}

fn account(
    status: MachineStatus,
    children: &HashMap<u32, Vec<u32>>,
    shared: &HashSet<u64>,
    images: &HashSet<u64>,
) -> MachineMemory {
    let mut processes = vec![status.pid];
    let mut at = 0;
    while let Some(pid) = processes.get(at).copied() {
        processes.extend(children.get(&pid).into_iter().flatten());
        at += 1;
    }
    let mut pss = Counted::default();
    for pid in &processes {
        pss.add(&fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default(), shared, images);
    }
    MachineMemory {
        own_bytes: Files::of(status.pid).unwrap_or_default().without(shared).bytes(),
        balloon_bytes: balloon(status.pid).map_or(0, |[_, actual]| actual),
        processes: processes.len(),
        machine: status.name,
        template: status.template,
        pss,
    }
}

impl Render for Map {
    fn render(&self, text: &mut Text) {
        if self.templates.is_empty() && self.machines.is_empty() {
            text.line("no machine runs");
            return;
        }
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let heading =
            ["machine", "template", "own", "balloon", "processes", "PSS: base", "own", "images", "monitor"]
                .map(str::to_owned)
                .to_vec();
        let shared = |one: &TemplateMemory| {
            let none = || "-".to_owned();
            vec![
                "(shared)".to_owned(),
                one.template.to_string(),
                mib(one.base_bytes),
                none(),
                none(),
                none(),
                none(),
                none(),
            ]
        };
        let image = |one: &ImageMemory| {
            let name = one.file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let cached = one.cached_bytes.map_or_else(|| "?".to_owned(), mib);
            let none = || "-".to_owned();
            vec!["(image)".to_owned(), name, cached, none(), none(), none(), none(), none(), none()]
        };
        let row = |one: &MachineMemory| {
            let Counted { base_bytes, own_bytes, image_bytes, monitor_bytes, .. } = one.pss;
            let (name, template) = (one.machine.to_string(), one.template.to_string());
            let pss = [base_bytes, own_bytes, image_bytes, monitor_bytes].map(mib);
            let (own, balloon) = (mib(one.own_bytes), mib(one.balloon_bytes));
            [vec![name, template, own, balloon, one.processes.to_string()], pss.to_vec()].concat()
        };
        let rows = [heading].into_iter().chain(self.templates.iter().map(shared));
        let rows = rows.chain(self.images.iter().map(image));
        text.table(&rows.chain(self.machines.iter().map(row)).collect::<Vec<_>>());
        text.line("");
        text.line(format!(
            "guests' memory: {} with each template once; mapped, by the host's kernel: {}, and monitors {}",
            mib(self.guest_bytes),
            mib(self.pss_guest_bytes),
            mib(self.pss_monitor_bytes)
        ));
        if !self.images.is_empty() {
            text.line(format!(
                "images of disks: {} of them are mapped, and each of these pages exists once",
                mib(self.pss_image_bytes)
            ));
        }
        if self.pss_region_bytes > 0 {
            let mapped = mib(self.pss_region_bytes);
            text.line(format!("regions: {mapped} of them are these machines' part of what is mapped"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_counted_by_their_file() {
        const SMAPS: &str = "40000000-50000000 r-xs 00000000 00:01 7 /memfd:mercury-base (deleted)\n\
            Size:             262144 kB\nRss:                 400 kB\nPss:                 100 kB\n\
            50000000-50001000 rw-s 00001000 00:01 8                      /memfd:mercury-hosted (deleted)\n\
            Pss:                   4 kB\n\
            60000000-60001000 r-xs 00001000 fe:00 9                      /srv/base.img\n\
            Pss:                   5 kB\n\
            60001000-60002000 r-xp 00001000 fe:00 9                      /srv/base.img\n\
            Pss:                   1 kB\n\
            70000000-70001000 rw-s 00001000 00:01 10                     /memfd:mercury-region (deleted)\n\
            Pss:                   3 kB\n\
            7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \nPss:                  11 kB\nVmFlags: rd wr\n";
        let mut counted = Counted::default();
        let shared = HashSet::from([7]);
        let images = HashSet::from([9]);
        counted.add(SMAPS, &shared, &images);
        counted.add(SMAPS, &shared, &images);
        let expected = Counted {
            base_bytes: 200 << 10,
            own_bytes: 8 << 10,
            image_bytes: 10 << 10,
            region_bytes: 6 << 10,
            monitor_bytes: 24 << 10,
        };
        assert_eq!(counted, expected);
    }

    #[test]
    fn files_of_several_machines_are_shared_without_a_template_too() {
        let files = |all: &[(u64, bool)]| {
            Files(
                all.iter().map(|(number, is_base)| (*number, Open { bytes: 1, is_base: *is_base })).collect(),
            )
        };
        let machines =
            [files(&[(1, true), (2, false), (3, false)]), files(&[(1, true), (2, false), (4, false)])];
        assert_eq!(shared_of(&[], &machines), HashSet::from([1, 2]));
        assert_eq!(shared_of(&[], &machines[..1]), HashSet::from([1]));
        assert_eq!(shared_of(&[files(&[(3, false)])], &machines), HashSet::from([1, 2, 3]));
        assert_eq!(machines[0].clone().without(&HashSet::from([1, 2])).bytes(), 1);
    }

    #[test]
    fn processes_have_their_children() {
        let child = std::process::Command::new("sleep").arg("10").spawn();
        if let Ok(mut child) = child {
            assert!(parents()[&std::process::id()].contains(&child.id()));
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
