//! Disks whose images are a part of guests' memory, shared by machines.

use super::{
    disco::{archive_of, disco, done, in_folder, json, tell, wait_for},
    *,
};

/// The programs of the machines.
const TOOLS: [&str; 7] = ["cat", "dd", "md5sum", "mkdir", "mount", "sync", "umount"];
const LIBRARIES: [&str; 4] = ["libblkid.so.1", "libmount.so.1", "libpcre2-8.so.0", "libselinux.so.1"];
/// The size of the largest file of the image, in bytes.
const BIG: usize = 12 << 20;
/// The size of the image. It is no multiple of a page, and its end is in the last page of the disk.
const IMAGE: u64 = (24 << 20) + 512;
/// The first program does what it is told, line by line.
const INIT: &str = "#!/bin/sh\n\
    mkdir -p /proc /mnt /dev; mount -t proc proc /proc; mount -t devtmpfs dev /dev\n\
    while [ ! -e /dev/pmem0 ] && [ ! -e /dev/vda ]; do :; done\n\
    echo ready; while read -r line; do eval \"$line\"; done\n";
/// Time goes on while a machine is saved, and its kernel takes that for a stall.
const QUIET: &str = "rcupdate.rcu_cpu_stall_suppress=1 nosoftlockup";

/// The files of the machines, and an image with a file system.
struct Images {
    place: Place,
    initramfs: PathBuf,
    image: PathBuf,
    /// The sum of the large file in the image.
    sum: String,
}

impl Images {
    fn new(name: &str) -> Result<Self> {
        let place = Place::new(name)?;
        in_folder(&place);
        let tree = Image::ensure(Release::Bookworm)?.tree();
        let initramfs = place.file("initramfs", &archive_of(&tree, INIT, &TOOLS, &LIBRARIES));
        let content = place.directory.join("content");
        fs::create_dir(&content).expect("a folder");
        let bytes: Vec<u8> =
            (0..BIG as u64 / 8).flat_map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()).collect();
        fs::write(content.join("big"), bytes).expect("a file");
        fs::write(content.join("word"), "first\n").expect("a file");
        fs::copy(tree.join("usr/bin/cat"), content.join("cat")).expect("a program");
        let sum = md5(&content.join("big"));
        let image = place.directory.join("base.img");
        File::create(&image).and_then(|file| file.set_len(IMAGE)).expect("an image");
        let mut make = Command::new("mke2fs");
        make.args(["-q", "-t", "ext4", "-b", "4096", "-O", "^has_journal", "-d"]).arg(&content).arg(&image);
        host::run("the image's file system", "mke2fs", &mut make)?;
        give_to_nobody(&image);
        Ok(Self { place, initramfs, image, sum })
    }

    /// Starts a machine with the image, used in some way.
    fn start(&self, name: &str, access: &str, more: &[&str]) -> Machine {
        let mut command = self.place.run();
        command.arg("--initramfs").arg(&self.initramfs).args(["--memory", "128"]).args(more);
        command.arg("--disk").arg(format!("base.img,{access}")).args(["--append", QUIET]);
        command.current_dir(&self.place.directory);
        let mut machine = Machine::with_log(&mut command, &self.place.directory.join(name));
        machine.wait_for("ready\n");
        machine
    }

    fn refused(&self, arguments: &[&str], word: &str) {
        let mut command = self.place.run();
        command.arg("--initramfs").arg(&self.initramfs).args(arguments).current_dir(&self.place.directory);
        let output = command.stdin(Stdio::null()).output().expect("the command");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(word), "{word}: {said}");
    }
}

fn md5(path: &Path) -> String {
    let output = Command::new("md5sum").arg(path).output().expect("md5sum");
    String::from_utf8_lossy(&output.stdout).split(' ').next().unwrap_or_default().to_owned()
}

/// Has a machine do something, and returns what it has said meanwhile. `mark` is a word for it alone.
fn ask(machine: &mut Machine, line: &str, mark: &str) -> String {
    let before = machine.said().len();
    machine.type_line(&format!("{line}; echo =''{mark}=$?"));
    machine.wait_for(&format!("\n={mark}="));
    let said = machine.said();
    said[before..].to_owned()
}

/// Returns what the host's kernel counts for mappings of a file in all processes of machines, in bytes: the
/// pages that are mapped, each as often as it is, and as a part of each of its mappings (PSS).
fn mapped(image: &Path) -> (u64, u64) {
    let (mut rss, mut pss) = (0, 0);
    for entry in fs::read_dir("/proc").expect("the host's processes").flatten() {
        let smaps = fs::read_to_string(entry.path().join("smaps")).unwrap_or_default();
        let mut is_image = false;
        for line in smaps.lines() {
            let size = |rest: &str| rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10;
            if let Some(rest) = line.strip_prefix("Pss:").filter(|_| is_image) {
                pss += size(rest);
            } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| is_image) {
                rss += size(rest);
            } else if line.split(' ').next().is_some_and(|range| range.contains('-')) {
                is_image = line.ends_with(&*image.to_string_lossy());
            }
        }
    }
    (rss, pss)
}

/// Machines with one image read the pages of the host, once. One writes, and the others see nothing of it.
#[test]
#[ignore = "long"]
fn machines_share_an_image_and_keep_their_writes() -> Result<()> {
    let images = Images::new("images")?;
    let before = md5(&images.image);
    let mut reader = images.start("reader", "shared", &[]);
    let mut writer = images.start("writer", "private", &[]);
    for (machine, how) in [(&mut reader, "ro"), (&mut writer, "rw")] {
        let said =
            ask(machine, &format!("mount -t ext4 -o {how},dax /dev/pmem0 /mnt; cat /proc/mounts"), "mounted");
        assert!(said.contains("=mounted=0") && said.contains("dax=always"), "{said}");
        let cached = "while read -r name size rest; do case $name in Cached:) echo cac''hed $size;; esac; \
             done </proc/meminfo";
        let said = ask(machine, &format!("{cached}; md5sum /mnt/big; {cached}"), "summed");
        assert!(said.contains(&images.sum), "{said}");
        let sizes: Vec<u64> =
            said.lines().filter_map(|line| line.strip_prefix("cached ")?.parse().ok()).collect();
        assert!(sizes.len() == 2 && sizes[1] < sizes[0] + 1024, "the guest keeps no copy: {said}");
        // A program of the disk is executed in place.
        assert!(ask(machine, "/mnt/cat /mnt/word", "ran").contains("first\n"));
    }
    let (rss, pss) = mapped(&images.image);
    println!("of the image {rss} bytes are mapped, and {pss} exist");
    assert!(rss >= 2 * BIG as u64, "each machine has mapped the file: {rss}");
    assert!(pss <= IMAGE.next_multiple_of(4096), "pages exist once: {pss}");

    let write = "echo second >/mnt/word; dd if=/dev/zero of=/mnt/big bs=4096 seek=7 count=300 \
         conv=notrunc,fsync; mkdir /mnt/new; sync; md5sum /mnt/big; cat /mnt/word";
    let said = ask(&mut writer, write, "written");
    assert!(said.contains("second\n") && !said.contains(&images.sum), "{said}");
    let again = "umount /mnt; mount -t ext4 -o rw,dax /dev/pmem0 /mnt; cat /mnt/word; md5sum /mnt/big";
    let said = ask(&mut writer, again, "again");
    assert!(said.contains("second\n") && !said.contains(&images.sum), "{said}");
    let said = ask(&mut reader, "echo 3 >/proc/sys/vm/drop_caches; cat /mnt/word; md5sum /mnt/big", "read");
    assert!(said.contains("first\n") && said.contains(&images.sum), "{said}");
    let mut third = images.start("third", "private", &["--disk", "base.img,shared"]);
    let said =
        ask(&mut third, "mount -t ext4 -o ro,dax /dev/pmem1 /mnt; cat /mnt/word; md5sum /mnt/big", "third");
    assert!(said.contains("first\n") && said.contains(&images.sum), "{said}");
    assert_eq!(md5(&images.image), before, "nobody writes to the image");

    // A disk that is shared is only read: the machine ends, and says why.
    reader.type_line("dd if=/dev/zero of=/dev/pmem0 bs=4096 count=1 conv=notrunc,fsync");
    let log = reader.end(BROKEN);
    assert!(log.contains("the guest writes to /dev/pmem0, which is base.img,shared"), "{log}");
    assert!(ask(&mut writer, "cat /mnt/word", "still").contains("second\n"));
    assert_well(&writer.said());
    assert_well(&third.said());
    assert_eq!(md5(&images.image), before, "nobody writes to the image");

    images.refused(&["--disk", "base.img"], "is in use");
    images.refused(&["--disk", "base.img,private", "--cpus", "2"], "only a machine with one processor");
    images.refused(&["--disk", "base.img,shared", ISOLATIONS[1]], "only a machine with one processor");
    Ok(())
}

/// Another program that opens an image for writing, or cuts it off, waits until the machines have ended,
/// which they do at once. An image that a person changes all the same ends the machine when it reads there.
#[test]
#[ignore = "long"]
fn an_image_that_others_change_ends_its_machines() -> Result<()> {
    let images = Images::new("changed")?;
    let mount = "mount -t ext4 -o ro,dax /dev/pmem0 /mnt; md5sum /mnt/big";
    // `truncate` does not want to wait.
    let changes =
        ["dd if=/dev/null of=base.img bs=1M seek=1 2>&1", "echo x >>base.img", "! truncate -s 1M base.img"];
    for change in changes {
        let copy = fs::read(&images.image).expect("the image");
        let (mut one, other) = (images.start("one", "shared", &[]), images.start("other", "private", &[]));
        assert!(ask(&mut one, mount, "summed").contains(&images.sum));
        let start = Instant::now();
        let mut changing = Command::new("sh");
        changing.args(["-c", change]).current_dir(&images.place.directory);
        assert!(changing.status().expect("a shell").success());
        println!("{change} took {} ms", start.elapsed().as_millis());
        for machine in [one, other] {
            let log = machine.end(BROKEN);
            assert!(log.contains("another program opens the image of a disk for writing"), "{log}");
        }
        place_again(&images, &copy);
    }
    let writer = File::options().append(true).open(&images.image).expect("the image");
    images.refused(&["--disk", "base.img,shared"], "has base.img open for writing");
    drop(writer);

    // A file that is root's, and immutable, needs no lease.
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    std::os::unix::fs::chown(&images.image, Some(0), Some(0)).expect("its owner");
    fs::set_permissions(&images.image, fs::Permissions::from_mode(0o644)).expect("its rights");
    images.refused(&["--disk", "base.img,shared"], "cannot keep other programs from writing to base.img");
    let chattr = |word: &str| Command::new("chattr").arg(word).arg(&images.image).status().expect("chattr");
    if !chattr("+i").success() {
        println!("the file system has no immutable files");
        return Ok(());
    }
    let mut machine = images.start("immutable", "shared", &[]);
    let said = ask(&mut machine, "mount -t ext4 -o ro,dax /dev/pmem0 /mnt; cat /mnt/word", "mounted");
    assert!(said.contains("first\n"), "{said}");
    assert!(chattr("-i").success());
    File::options().write(true).open(&images.image).and_then(|file| file.set_len(1 << 20)).expect("its end");
    machine.type_line("md5sum /mnt/big");
    let log = machine.end(BROKEN);
    assert!(log.contains("the host cannot read a page of the guest's memory"), "{log}");
    Ok(())
}

fn place_again(images: &Images, bytes: &[u8]) {
    fs::write(&images.image, bytes).expect("the image");
}

/// Clones begin with what the saved machine had written to its disk, and write to their own. Forks have what
/// their source had written, and so has a machine that was saved.
#[test]
#[ignore = "long"]
fn clones_and_forks_carry_their_writes() -> Result<()> {
    const WRITE: &str = "word() { echo $1 >/mnt/word; sync; }; show() { echo 3 >/proc/sys/vm/drop_caches; \
         echo \"$1 has $(cat /mnt/word) $(md5sum </mnt/big)\"; }";
    let images = Images::new("clones")?;
    let place = &images.place;
    let before = md5(&images.image);
    let mut machine = images.start("first", "private", &["--control", "control"]);
    let said = ask(&mut machine, "mount -t ext4 -o rw,dax /dev/pmem0 /mnt", "mounted");
    assert!(said.contains("=mounted=0"), "{said}");
    // A page of zeros that was none in the image.
    ask(&mut machine, "dd if=/dev/zero of=/mnt/big bs=4096 seek=3 count=2 conv=notrunc", "zeroed");
    let said = ask(&mut machine, &format!("{WRITE}; word saved; show first"), "shown");
    let line = said.lines().find(|line| line.starts_with("first has saved ")).expect("the sum");
    let sum = line.split(' ').nth(3).expect("a sum").to_owned();
    assert_ne!(sum, images.sum);
    let mut save = as_nobody(&place.command);
    done({
        save.args(["hosted", "save", "control", "saved"]).current_dir(&place.directory);
        save
    });
    machine.end(HALTED);
    let size = fs::metadata(place.directory.join("saved")).expect("the file").len();
    assert!(size < 60 << 20, "the image is not in the file: {size}");

    // It goes on from the file.
    let options = ["--kernel", "vmlinux", "--memory", "128", "--disk", "base.img,private"];
    let mut restore = as_nobody(&place.command);
    restore.args(["hosted", "restore", "saved"]).args(options).current_dir(&place.directory);
    let mut restored = Machine::with_log(&mut restore, &place.directory.join("restored"));
    restored.type_line("show restored");
    restored.wait_for(&format!("restored has saved {sum}"));
    drop(restored);
    let mut other = as_nobody(&place.command);
    other.args(["hosted", "restore", "saved"]).args(&options[..4]).current_dir(&place.directory);
    let output = other.args(["--disk", "base.img,shared"]).output().expect("the command");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("has memory that"));

    done(disco(place, &[&["template", "web", "saved"], &options[..]].concat()));
    done(disco(place, &["run", "web", "--count", "3"]));
    let show = |machine: &str, word: &str, expected: &str| {
        tell(place, machine, &format!("show {word}\n"));
        let found = wait_for(place, machine, &format!("{word} has {expected} {sum}"));
        assert_well(&found);
    };
    for number in 1..=3 {
        show(&format!("web-{number}"), "clone", "saved");
    }
    tell(place, "web-1", "word one; show now\n");
    wait_for(place, "web-1", &format!("now has one {sum}"));
    show("web-2", "other", "saved");
    let map = json(place, &["map"]);
    let of = |value: &serde_json::Value, name: &str| value[name].as_u64().expect("a size");
    assert!(map["images"][0]["file"].as_str().expect("a file").ends_with("base.img"), "{map}");
    let cached = of(&map["images"][0], "cached_bytes");
    assert!(cached >= BIG as u64 && cached <= IMAGE.next_multiple_of(4096), "{map}");
    assert!(of(&map, "pss_image_bytes") <= cached && of(&map, "pss_image_bytes") > BIG as u64 / 2, "{map}");
    for machine in map["machines"].as_array().expect("machines") {
        assert!(of(&machine["pss"], "image_bytes") < cached / 2, "its part of what three have: {map}");
    }

    done(disco(place, &["fork", "web-1", "--name", "copy"]));
    show("copy", "fork", "one");
    tell(place, "copy", "word two; show own\n");
    wait_for(place, "copy", &format!("own has two {sum}"));
    show("web-1", "source", "one");
    done(disco(place, &["fork", "copy", "--name", "deep"]));
    show("deep", "deep", "two");
    done(disco(place, &["save", "copy", "later.saved"]));
    done(disco(place, &[&["template", "later", "later.saved"], &options[..]].concat()));
    done(disco(place, &["run", "later", "--detach"]));
    show("later-1", "later", "two");
    show("web-3", "third", "saved");
    assert_eq!(md5(&images.image), before, "nobody writes to the image");

    // Another program that writes to the image ends both templates and all machines.
    let status = Command::new("sh").args(["-c", "echo x >>base.img"]).current_dir(&place.directory).status();
    assert!(status.expect("a shell").success());
    for machine in ["web-1", "web-2", "web-3", "copy", "deep", "later-1"] {
        wait_for(place, machine, "another program opens the image");
    }
    assert!(json(place, &["list"])["templates"].as_array().expect("templates").is_empty());
    Ok(())
}
