//! Power cuts while an image is written, and while a machine is restored. At each moment the
//! previous image is whole, a torn one is refused, file systems are clean, and the next restore
//! works.
//!
//! `make test FULL=1` tries a few moments, `MERCURY_POWER_CUTS=50` fifty of both;
//! `MERCURY_POWER_SEED` repeats a run's moments.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{
    Boot, Bus, Cache, Disk, Disks, Kernel, Machine, Moments, Qemu, Result, Spec, artefacts::build_program,
};

/// The last good image, and the image that is written over an older one.
const GOOD: (&str, Disk) = ("/dev/vda", Disk::Extra(0));
const NEXT: (&str, Disk) = ("/dev/vdb", Disk::Extra(1));
const FEW: u32 = 2;
/// The number of cuts while one image is written.
const A_ROUND: u32 = 13;
/// One of so many cuts of a restore is followed by a whole restore.
const SAMPLE: u32 = 10;
const MINUTES: Duration = Duration::from_secs(180);

/// A script that writes to the root file system all the time, and reports its progress.
const WRITER: &str = "setsid sh -c 'i=0; while :; do i=$((i+1)); echo $i > /root/work.$((i%64)); \
     test $((i%16)) = 0 && sync /root/work.0; echo $i > /run/work.new; mv /run/work.new /run/work; \
     sleep 0.02; done' > /dev/null 2>&1 < /dev/null &";

/// A folder on this host, which goes when this value is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A machine that is off, with its image on the first disk, an older one on the second, and the
/// system that restores it.
struct Subject {
    machine: Machine,
    boot: Boot,
    disks: Disks,
    boot_id: String,
    folder: Folder,
    writing: Duration,
    restoring: Duration,
}

/// Returns the command, for images on this host.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build_program("mercury-cli", "mercury").unwrap())
}

/// Returns the output of `mercury inspect` for a whole image, and the refusal of another one.
fn inspect(disks: &Disks, disk: Disk, folder: &Path) -> Result<std::result::Result<String, String>> {
    let copy = folder.join("image");
    disks.save(disk, &copy)?;
    let output = Command::new(program()).arg("inspect").arg(&copy).output().unwrap();
    fs::remove_file(&copy).unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !output.status.success() {
        return Ok(Err(text(&output.stderr)));
    }
    let said = text(&output.stdout);
    assert!(said.contains("whole: "), "{said}");
    Ok(Ok(said.split([' ', ',']).nth(1).unwrap().to_owned()))
}

/// Returns the system that restores the machine, as the machine's own command prepares it.
fn prepare(machine: &Machine, folder: &Folder) -> Result<Boot> {
    let line = "mercury restore --json --prepare /root/restore --module $MERCURY_MODULE";
    let said: serde_json::Value = serde_json::from_str(&machine.sh(&format!("{line} {}", GOOD.0))?).unwrap();
    let fetch = |name: &str| -> Result<PathBuf> {
        let path = folder.0.join(name);
        fs::write(&path, machine.get(&format!("/root/restore/{name}"))?).unwrap();
        Ok(path)
    };
    let (kernel, initramfs) = (fetch("vmlinuz")?, fetch("initramfs")?);
    let command_line = said["command_line"].as_str().unwrap().to_owned();
    Ok(Boot { kernel, initramfs, command_line })
}

impl Subject {
    fn new() -> Result<Self> {
        // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
        // during a snapshot.
        let spec = Spec::new(Kernel::BookwormCloud).qemu_version(Qemu::Newer);
        let machine = Machine::boot(spec.disk(Bus::Virtio, 1024).disk(Bus::Virtio, 1024))?;
        machine.sh(WRITER)?;
        let folder = Folder(env::temp_dir().join(format!("mercury-power-{}", machine.pid())));
        fs::create_dir_all(&folder.0).unwrap();
        let boot = prepare(&machine, &folder)?;
        let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
        machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
        let begun = Instant::now();
        machine.sh(&format!("mercury checkpoint {}", NEXT.0))?;
        let writing = begun.elapsed();
        let _checkpoint = machine.spawn(&format!("mercury checkpoint --poweroff {}", GOOD.0))?;
        machine.wait_shutdown(MINUTES)?;
        let disks = machine.keep_disks()?;
        Ok(Self { machine, boot, disks, boot_id, folder, writing, restoring: Duration::ZERO })
    }

    /// Restores completely: the machine of the image runs on.
    fn restore(mut self) -> Result<Self> {
        let begun = Instant::now();
        self.machine = self.machine.start_other(&self.boot)?;
        self.restoring = begun.elapsed();
        assert_eq!(self.machine.sh("cat /proc/sys/kernel/random/boot_id")?, self.boot_id);
        let line = "before=$(cat /run/work); for i in $(seq 100); do test $(cat /run/work) -gt $before && \
                    exit 0; sleep 0.1; done; exit 1";
        self.machine.sh(line)?;
        self.machine.sh("! dmesg | grep -iE 'call trace|ext4.*error'")?;
        Ok(self)
    }

    fn inspect(&self, disks: &Disks, disk: Disk) -> Result<std::result::Result<String, String>> {
        inspect(disks, disk, &self.folder.0)
    }

    /// Cuts the power at moments. Returns the moments, with copies of the disks; the disks after
    /// the last moment are the machine's own.
    fn cut_while_writing(&self, moments: &[Duration]) -> Result<Vec<(Duration, Option<Disks>)>> {
        let _checkpoint = self.machine.spawn(&format!("mercury checkpoint {}", NEXT.0))?;
        let (begun, mut stopped, mut cuts) = (Instant::now(), Duration::ZERO, Vec::new());
        for (number, moment) in (1..).zip(moments) {
            thread::sleep((*moment + stopped).saturating_sub(begun.elapsed()));
            let copying = Instant::now();
            if number == moments.len() {
                self.machine.power_cut()?;
                cuts.push((*moment, None));
                break;
            }
            let copy = self.folder.0.join(format!("cut-{number}"));
            cuts.push((*moment, Some(self.machine.copy_disks(&self.disks, &copy)?)));
            stopped += copying.elapsed();
        }
        Ok(cuts)
    }
}

/// Returns the kind of a refusal, without its place.
fn kind(refusal: &str) -> String {
    let (_, why) = refusal.split_once("the image is refused: ").unwrap_or_else(|| panic!("{refusal}"));
    why.lines().next().unwrap_or_default().chars().filter(|letter| !letter.is_ascii_digit()).collect()
}

/// Cuts the power while an image is written. In each round the last good image, with its disks put
/// back, restores the machine. The machine then writes over the other image, and the power goes.
/// Before that the disks are copied at other moments, as a power cut would leave them.
fn while_writing(mut subject: Subject, moments: &mut Moments) -> Result<Subject> {
    let older = subject.inspect(&subject.disks, NEXT.1)?.unwrap();
    println!("writing takes {:.1?}", subject.writing);
    let rounds = moments.count().div_ceil(A_ROUND) as usize;
    let all = moments.over(subject.writing.mul_f64(0.9));
    let mut found: BTreeMap<String, u32> = BTreeMap::new();
    for round in 0..rounds {
        let cache = if round % 2 == 0 { Cache::Through } else { Cache::Back };
        subject.disks.put_back(Disk::Root, Cache::Back)?;
        subject.disks.put_back(NEXT.1, cache)?;
        subject = subject.restore()?;
        let own: Vec<_> = all.iter().copied().skip(round).step_by(rounds).collect();
        for (moment, disks) in subject.cut_while_writing(&own)? {
            let disks = disks.as_ref().unwrap_or(&subject.disks);
            assert!(disks.is_as_kept(GOOD.1)?, "the image before, after {moment:?}");
            disks.root_recovers(&subject.folder.0)?;
            let what = match subject.inspect(disks, NEXT.1)? {
                Ok(identity) if identity == older => "nothing is written".to_owned(),
                Ok(_) => "it is whole".to_owned(),
                Err(reason) => kind(&reason),
            };
            println!("cut {moment:.2?} after the command, {cache:?}: {what}");
            *found.entry(format!("{cache:?}: {what}")).or_default() += 1;
        }
    }
    println!("{} cuts while writing: {found:?}", moments.count());
    Ok(subject)
}

/// Cuts the power during a restore, from before the restore environment's start to after the
/// landing. If the restored machine has written to its disk, the image is refused until the disk is
/// put back.
fn while_restoring(mut subject: Subject, moments: &mut Moments) -> Result<()> {
    subject.disks.put_back(Disk::Root, Cache::Back)?;
    subject = subject.restore()?;
    println!("restoring takes {:.1?}", subject.restoring);
    let (mut landed, mut restored) = (0, 0);
    for (number, moment) in (1..).zip(moments.over(subject.restoring.mul_f64(1.2))) {
        subject.machine.power_cut()?;
        subject.disks.put_back(Disk::Root, Cache::Back)?;
        let said = subject.machine.try_other(&subject.boot, moment)?;
        assert!(!said.contains("could not be brought back"), "{said}");
        assert!(subject.disks.is_as_kept(GOOD.1)?, "the image, cut after {moment:?}");
        let is_untouched = subject.disks.is_as_kept(Disk::Root)?;
        println!(
            "cut {moment:.2?} after the start: {}",
            if is_untouched { "nothing is written" } else { "landed" }
        );
        if !is_untouched {
            landed += 1;
            if landed == 1 && moments.count() > FEW {
                let said = subject.machine.try_other(&subject.boot.with("mercury.give-up"), MINUTES)?;
                assert!(said.contains("was written to after the instant"), "{said}");
            }
            subject.disks.put_back(Disk::Root, Cache::Back)?;
        }
        if number % SAMPLE == 0 || number == moments.count() {
            restored += 1;
            subject = subject.restore()?;
        }
    }
    println!(
        "{} cuts while restoring: {landed} after the landing, {restored} restored again",
        moments.count()
    );
    subject.machine.power_cut()?;
    assert!(subject.inspect(&subject.disks, GOOD.1)?.is_ok());
    Ok(())
}

#[test]
#[ignore = "long"]
fn power_cuts_while_writing_and_restoring_lose_nothing() -> Result<()> {
    let mut moments = Moments::new("MERCURY_POWER_SEED", "MERCURY_POWER_CUTS", FEW);
    let subject = while_writing(Subject::new()?, &mut moments)?;
    while_restoring(subject, &mut moments)
}
