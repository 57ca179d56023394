//! The place of an image, as the restore environment reaches it: a block device, or a file on a
//! file system that is mounted there read-only. No journal is replayed: no disk changes before the
//! machine is back.

use crate::images;
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_image::FileSystem;
use mercury_quiesce::{
    disks,
    ethernet::{self, Card},
    file_systems::Kind,
    mounts, reachable,
};
use rustix::mount::{MountFlags, mount};
use serde::{Deserialize, Serialize};
use std::{
    ffi::CString,
    io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Mount point in the restore environment for the file system with the image.
const MOUNTED_AT: &str = "/mnt";
/// Time for a server or a disk to appear.
const PATIENCE: Duration = Duration::from_secs(60);

/// The place of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// From the first byte of a block device on.
    Device(PathBuf),
    /// An image in a file.
    File(Mount),
}

/// A file, and the file system that it is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Path of the file, from the root of its file system.
    path: PathBuf,
    /// Type of the file system, as `mount` takes it.
    kind: String,
    /// Mount options, as the kernel takes them.
    options: String,
    medium: Medium,
}

/// The medium of a file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Medium {
    /// A disk, which may have another name in the restore environment.
    Disk(Box<FileSystem>),
    /// A server, by NFS's name for it, and the card that reaches it.
    Server { source: String, card: Card },
}

fn refused(text: String) -> Error {
    Error::new(Exit::Failed, text).hint(
        "the restore environment can read NFS, and ext4, XFS, btrfs and FAT on partitions; or copy the \
         image to a partition of its own, `cp FILE /dev/…`, and name that",
    )
}

impl Place {
    /// Finds the place of `image`. If the image is yet to be made, its folder must exist.
    ///
    /// # Errors
    ///
    /// Returns an error if the restore environment cannot reach it.
    pub fn of(image: &Path, sysroot: &Sysroot) -> Result<Self> {
        use std::os::unix::fs::FileTypeExt;
        let path = whole_path(image).map_err(|error| images::unreadable(image, &error))?;
        let kind = path.metadata().map(|found| found.file_type());
        if kind.as_ref().is_ok_and(FileTypeExt::is_block_device) {
            if path.to_string_lossy().contains(char::is_whitespace) {
                return Err(refused(format!("{} has a space in its name", path.display())));
            }
            if let Some(why) = reachable::obstacle(&path, sysroot) {
                return Err(refused(format!("{} {why}", image.display())));
            }
            return Ok(Self::Device(path));
        }
        if kind.is_ok_and(|kind| !kind.is_file()) {
            return Err(refused(format!("{} is neither a file nor a block device", image.display())));
        }
        let table = sysroot.bytes("proc/self/mountinfo").unwrap_or_default();
        let table = String::from_utf8_lossy(&table);
        let line = mounts::line_of(&table, &path);
        let on = line
            .and_then(Line::parse)
            .ok_or_else(|| refused("/proc/self/mountinfo cannot be read".into()))?;
        on.place(&path, ethernet::cards(sysroot), sysroot).map(Self::File).map_err(|why| {
            refused(format!("{} is on a file system that cannot be used: {why}", image.display()))
        })
    }

    /// Returns the word for the kernel's command line.
    #[must_use]
    pub fn word(&self) -> String {
        match self {
            Self::Device(device) => device.display().to_string(),
            Self::File(_) => "file".into(),
        }
    }

    /// Returns the disk that has to be read, if it is a disk.
    #[must_use]
    pub fn disk(&self) -> Option<PathBuf> {
        match self {
            Self::Device(device) => Some(device.clone()),
            Self::File(Mount { medium: Medium::Disk(file_system), .. }) => {
                Some(file_system.device.clone().into())
            }
            Self::File(_) => None,
        }
    }

    /// Returns the network card that is needed, if one is.
    #[must_use]
    pub fn card(&self) -> Option<String> {
        match self {
            Self::File(Mount { medium: Medium::Server { card, .. }, .. }) => Some(card.name.clone()),
            _ => None,
        }
    }

    /// Lists the modules of the file system.
    #[must_use]
    pub fn modules(&self) -> Vec<String> {
        match self {
            Self::Device(_) => Vec::new(),
            Self::File(mount) => mount.modules(),
        }
    }
}

/// Returns the whole path of a file that may not exist yet.
pub(super) fn whole_path(image: &Path) -> io::Result<PathBuf> {
    match image.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let folder = image.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new(".")).canonicalize()?;
            Ok(folder.join(image.file_name().ok_or(error)?))
        }
        result => result,
    }
}

struct Line {
    /// The part of the file system that is mounted.
    root: PathBuf,
    at: PathBuf,
    kind: String,
    source: String,
    options: String,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let front: Vec<_> = front.split(' ').collect();
        let back: Vec<_> = back.split(' ').collect();
        Some(Self {
            root: mounts::unescaped(front.get(3)?).into(),
            at: mounts::unescaped(front.get(4)?).into(),
            kind: (*back.first()?).to_owned(),
            source: mounts::unescaped(back.get(1)?),
            options: (*back.get(2)?).to_owned(),
        })
    }

    /// Returns the mount of a file on this file system, or the obstacle as a clause.
    fn place(self, path: &Path, cards: Vec<Card>, sysroot: &Sysroot) -> std::result::Result<Mount, String> {
        let options = match self.kind.as_str() {
            "nfs" | "nfs4" => return self.on_server(path, cards),
            other => Kind::of(other).ok_or_else(|| format!("its type is {other}"))?.mount_options(),
        };
        let device = PathBuf::from(&self.source);
        if let Some(why) = reachable::obstacle(&device, sysroot) {
            return Err(format!("it is on {}, which {why}", self.source));
        }
        let mounted = mounts::Mounted {
            number: String::new(),
            at: self.at.clone(),
            kind: self.kind.clone(),
            device,
            writable: true,
        };
        let file_system = disks::name(&mounted);
        if file_system.uuid.is_none() {
            return Err("it has no known identity".into());
        }
        Ok(Mount {
            path: self.below_root(path),
            kind: self.kind,
            options: options.into(),
            medium: Medium::Disk(Box::new(file_system)),
        })
    }

    fn on_server(self, path: &Path, cards: Vec<Card>) -> std::result::Result<Mount, String> {
        let value = |name: &str| self.options.split(',').find_map(|option| option.strip_prefix(name));
        let server = value("addr=").ok_or("the options do not name the server")?;
        let server: Ipv4Addr = server.parse().map_err(|_| format!("its server is {server}, and not IPv4"))?;
        if let Some(secure) = value("sec=").filter(|secure| *secure != "sys" && *secure != "null") {
            return Err(format!("it wants {secure}"));
        }
        let card = cards.into_iter().filter(|card| card.up).max_by_key(|card| card.nearness(server));
        let card = card.filter(|card| card.nearness(server) > 0);
        let card = card.ok_or(
            "its server is not reached by an Ethernet card with an IPv4 address (bonds, \
            bridges and VLANs cannot be used)",
        )?;
        // Mounted read-only; the kernel chooses its client settings anew.
        let dropped = ["rw", "ro", "fsc", "clientaddr"];
        let kept = self.options.split(',').filter(|option| {
            let name = option.split('=').next().unwrap_or(option);
            !dropped.contains(&name)
        });
        let mut options: Vec<_> = kept.map(str::to_owned).collect();
        if self.kind == "nfs" {
            // The restore environment has no lock daemon.
            options.push("nolock".into());
        }
        Ok(Mount {
            path: self.below_root(path),
            kind: self.kind.clone(),
            options: options.join(","),
            medium: Medium::Server { source: self.source, card },
        })
    }

    fn below_root(&self, path: &Path) -> PathBuf {
        // The source of an NFS mount names its root.
        let root = if self.kind.starts_with("nfs") { Path::new("/") } else { &self.root };
        root.join(path.strip_prefix(&self.at).unwrap_or(path))
    }
}

impl Mount {
    fn modules(&self) -> Vec<String> {
        match self.kind.as_str() {
            "nfs" => vec!["nfs".into(), "nfsv3".into()],
            "nfs4" => vec!["nfs".into(), "nfsv4".into()],
            other => match Kind::of(other) {
                Some(kind) => kind.modules().iter().map(|&module| module.to_owned()).collect(),
                None => vec![other.to_owned()],
            },
        }
    }

    /// Mounts the file system in the restore environment, and returns the file's path there.
    ///
    /// # Errors
    ///
    /// Returns an error if that fails for too long.
    pub fn reach(&self) -> io::Result<PathBuf> {
        if let Medium::Server { card, .. } = &self.medium {
            ethernet::set_up(card)?;
        }
        let options = CString::new(self.options.as_str())?;
        let end = Instant::now() + PATIENCE;
        loop {
            let result = self.source().and_then(|source| {
                let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
                Ok(mount(source, MOUNTED_AT, self.kind.as_str(), flags, options.as_c_str())?)
            });
            match result {
                Ok(()) => break,
                Err(error) if Instant::now() > end => return Err(error),
                Err(_) => thread::sleep(Duration::from_millis(200)),
            }
        }
        Ok(Path::new(MOUNTED_AT).join(self.path.strip_prefix("/").unwrap_or(&self.path)))
    }

    fn source(&self) -> io::Result<PathBuf> {
        match &self.medium {
            Medium::Server { source, .. } => Ok(source.into()),
            Medium::Disk(file_system) => {
                disks::find(file_system, &Sysroot::default()).map_err(io::Error::other)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(address: [u8; 4], gateway: Option<[u8; 4]>) -> Card {
        Card {
            name: format!("eth{}", address[2]),
            mac: [2; 6],
            place: String::new(),
            index: 2,
            up: true,
            addresses: vec![(address.into(), 24)],
            gateway: gateway.map(Into::into),
        }
    }

    fn nfs(line: &str, cards: Vec<Card>) -> std::result::Result<Mount, String> {
        Line::parse(line).expect("a line").place(Path::new("/srv/images/now"), cards, &Sysroot::default())
    }

    const V4: &str = "40 30 0:46 / /srv rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2,rsize=65536,\
                      hard,proto=tcp,sec=sys,clientaddr=10.9.0.2,local_lock=none,addr=10.9.0.1";

    #[test]
    fn an_nfs_image_is_mounted_as_before() {
        let (near, out) = (card([10, 9, 0, 2], None), card([10, 8, 1, 2], Some([10, 8, 1, 1])));
        let found = nfs(V4, vec![out.clone(), near.clone()]).expect("a place");
        assert_eq!(found.path, Path::new("/images/now"));
        assert_eq!(
            found.options,
            "vers=4.2,rsize=65536,hard,proto=tcp,sec=sys,local_lock=none,addr=10.9.0.1"
        );
        assert_eq!(found.medium, Medium::Server { source: "server:/export".into(), card: near });
        let far = V4.replace("addr=10.9.0.1", "addr=192.0.2.1");
        let found = nfs(&far, vec![card([10, 9, 0, 2], None), out.clone()]).expect("a place");
        assert_eq!(found.medium, Medium::Server { source: "server:/export".into(), card: out });
        let three = nfs(&V4.replace("nfs4", "nfs"), vec![card([10, 9, 0, 2], None)]).expect("a place");
        assert!(three.options.ends_with(",nolock") && three.modules() == ["nfs", "nfsv3"]);
    }

    #[test]
    fn an_unreachable_image_is_refused() {
        let cards = || vec![card([10, 9, 0, 2], None)];
        let why = |line: &str, cards| nfs(line, cards).expect_err("refused");
        assert!(why(&V4.replace("sec=sys", "sec=krb5p"), cards()).contains("krb5p"));
        assert!(why(&V4.replace("addr=10.9.0.1", "addr=fd00::1"), cards()).contains("not IPv4"));
        assert!(why(&V4.replace("addr=10.9.0.1", "addr=192.0.2.1"), cards()).contains("Ethernet card"));
        assert!(why("40 30 0:46 / /srv rw - tmpfs tmpfs rw", cards()).contains("tmpfs"));
        // A device that does not exist has no known identity.
        let gone = "40 30 8:1 / /srv rw - ext4 /dev/no-such-disk rw";
        assert!(why(gone, cards()).contains("made of other devices"));
    }

    #[test]
    fn a_file_is_found_from_the_root_of_its_file_system() {
        let line = |root: &str| format!("40 30 0:46 {root} /srv rw - btrfs /dev/sda1 rw");
        let from = |root: &str| Line::parse(&line(root)).expect("a line").below_root(Path::new("/srv/x/now"));
        assert_eq!(from("/"), Path::new("/x/now"));
        assert_eq!(from("/@home"), Path::new("/@home/x/now"));
    }

    #[test]
    fn a_file_may_be_made_later() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().canonicalize().expect("a path").join("image");
        assert_eq!(whole_path(&path).expect("a path"), path);
        assert!(whole_path(&path.join("image")).is_err());
    }
}
