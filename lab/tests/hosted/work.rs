//! Work with known results: packages that apt fetches and installs, and a kernel that is built.

use std::fmt::Write as _;

use mercury_lab::{apt, hash::Ingredients, previrtualization::disk};

use super::*;

/// The limit of work that takes minutes natively.
const LONG_PATIENCE: Duration = Duration::from_secs(3600);

/// A program with a library of its own, which needs another one.
const PACKAGES: &str = "jq libjq1 libonig5";
/// A script that installs the program, and prints the results: the database's entries, the files of
/// any package that differ, the files themselves, the dynamic linker's table, and the program's
/// computation.
const INSTALL: &str = "\
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
apt-get -q update && apt-get -qy --no-install-recommends install jq
echo installed $?
echo 'the result:'
dpkg-query -W -f '${Package} ${Version} ${Status}\\n' PACKAGES
dpkg -V | grep -vE ' /usr/share/(doc|man|locale)/' | sort
dpkg -L PACKAGES | sort -u | while read -r file; do [ ! -f \"$file\" ] || sha256sum \"$file\"; done
ldconfig -p | grep -E 'libjq|libonig'
seq 1 1000 | jq -s 'add' | cat
jq -nc '[range(5) | {(tostring): (. * .)}] | add' | cat
echo 'that was it'
";

/// Returns the host's name servers as the guest reaches them by passt, and the kind of passt that
/// this takes.
fn names(gateway: &str) -> (String, &'static str) {
    let text = fs::read_to_string("/etc/resolv.conf").expect("/etc/resolv.conf");
    let has_own = text.lines().any(|line| line.starts_with("nameserver 127."));
    if has_own { (format!("nameserver {gateway}\n"), "passt,host") } else { (text, "passt") }
}

/// Gets packages by Debian's own apt over the machine's network card, from this host's mirror. The
/// packages are as on this host.
fn install(isolation: &str) -> Result<()> {
    let place = Place::new("apt")?;
    let image = Image::ensure(Release::Bookworm)?;
    let disk = place.root_disk(&image)?;
    let (address, gateway) = addresses();
    let (names, uplink) = names(&gateway);
    let options = apt::fetch_options().iter().fold(String::new(), |mut all, option| {
        writeln!(all, "{option};").expect("a text");
        all
    });
    let script = INSTALL.replace("PACKAGES", PACKAGES);
    let mut commands = String::new();
    for (to, text) in
        [("/etc/resolv.conf", &names), ("/etc/apt/apt.conf.d/99host", &options), ("/root/install", &script)]
    {
        let file = place.file("text", text.as_bytes());
        let file = file.with_file_name(to.rsplit('/').next().expect("a name"));
        fs::rename(place.directory.join("text"), &file).expect("its name");
        writeln!(commands, "rm {to}\nwrite {} {to}", file.display()).expect("a text");
    }
    let commands = place.file("commands", commands.as_bytes());
    let mut write = Command::new("debugfs");
    host::run("texts onto the disk", "hosted-apt", write.arg("-w").arg("-f").arg(commands).arg(&disk))?;
    let there = natively(&place, &image);
    assert!(there.contains("install ok installed\n") && there.contains("500500\n"), "{there}");
    let mut machine = shell_on_disk(&place, &disk, &[isolation, "--net", uplink]);
    machine.type_line(&format!(
        "ip link set lo up; ip address add {address} dev eth0; ip link set eth0 up; ip route add default via \
         {gateway}; mkdir -p /dev/pts; mount -t devpts d /dev/pts; sh /root/install 2>&1; echo do''ne $?"
    ));
    let start = Instant::now();
    machine.wait_within(LONG_PATIENCE, "done 0\n");
    println!("{isolation}: installed after {:?}", start.elapsed());
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    assert_well(&log);
    assert!(log.contains("installed 0\n"), "{log}");
    assert_eq!(between(&log, RESULT, THE_END), between(&there, RESULT, THE_END));
    let mut check = Command::new("e2fsck");
    host::run("the root disk's file system", "hosted-fsck", check.arg("-fn").arg(&disk))
}

const RESULT: &str = "the result:\n";
const THE_END: &str = "that was it\n";

/// Installs the same on this host, in the tree from which the disk was made, with a layer on top
/// for the writes.
fn natively(place: &Place, image: &Image) -> String {
    const ENTER: &str = "set -e
        mkdir $2/upper $2/layers $2/root
        mount -t overlay overlay -o lowerdir=$1,upperdir=$2/upper,workdir=$2/layers $2/root
        mount --rbind /dev $2/root/dev
        mount -t proc proc $2/root/proc
        cp $2/resolv.conf $2/root/etc/resolv.conf
        cp $2/99host $2/root/etc/apt/apt.conf.d/
        cp $2/install $2/root/root/
        chroot $2/root sh /root/install 2>&1";
    let mut command = host::as_root("unshare");
    command.args(["--mount", "sh", "-c", ENTER, "sh"]).arg(image.tree()).arg(&place.directory);
    let output = command.output().expect("the same on the host");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // Root owns what was written there.
    host::remove_tree(&place.directory.join("upper")).expect("the layer's end");
    host::remove_tree(&place.directory.join("layers")).expect("the layer's end");
    assert!(output.status.success() && said.contains("installed 0\n"), "{said}: {output:?}");
    said
}

#[test]
#[ignore = "long"]
fn apt_installs_what_it_installs_natively() -> Result<()> {
    install(ISOLATIONS[0])
}

#[test]
#[ignore = "long"]
fn apt_installs_the_same_in_processes_of_its_own() -> Result<()> {
    install(ISOLATIONS[1])
}

/// The part that is built without `MERCURY_BUILD=all`. A hosted machine takes many times as long as
/// its host for the whole.
const PART: &str = "kernel/time kernel/irq";

fn part() -> disk::Part {
    let all = std::env::var("MERCURY_BUILD").is_ok_and(|what| what == "all");
    if all { disk::Part::All } else { disk::Part::Directories(PART) }
}

/// The root for kernels has no command for a power-off.
const POWER_OFF: &str = "perl -e 'syscall(169, 0xFEE1DEAD, 672274793, 0x4321FEDC)'";

/// Builds the tiny kernel, pre-virtualized, or a part of it, from the disk of compilers and sources
/// onto another disk, and links it. Each object, and the kernel, equals this host's, bit by bit.
fn build(isolation: &str) -> Result<()> {
    const OBJECTS: &str = "find . -name '*.o' | LC_ALL=C sort | xargs sha256sum";
    let (release, flavour) = (Release::Bookworm, Flavour::Tiny);
    let native = previrtualization::build(release, flavour)?;
    let place = Place::new("build")?;
    let (tools, objects) =
        (place.name_for(&disk::tools(release)?, "tools.img")?, place.directory.join("objects.img"));
    disk::objects(release, (flavour, &native), part(), &place.directory, &objects)?;
    give_to_nobody(&objects);
    let mut command = place.run();
    command.args(["--disk", &format!("{},ro", tools.display()), "--disk"]).arg(&objects);
    command.args([isolation, "--memory", "1024", "--append", "root=/dev/vda ro init=/bin/sh"]);
    let mut machine = Machine::start(&place, &mut command);
    machine.wait_for("Run /bin/sh as init");
    machine.type_line(SHELL);
    machine.wait_for("ready\n");
    let directory = flavour.directory();
    let commands = disk::commands(release, flavour, "/dev/vdb");
    let start = Instant::now();
    machine.type_line(&format!("{commands}; echo bu''ilt $?; tail -n 5 /build/log"));
    machine.wait_within(LONG_PATIENCE, "built ");
    let needed = start.elapsed();
    machine.type_line(&format!(
        "cd /build/{directory}; {OBJECTS} > ../objects; wc -l < ../objects; cd /; sync; echo li''sted"
    ));
    machine.wait_for("listed\n");
    machine.type_line(&format!("umount -R /build; {POWER_OFF}"));
    let log = machine.end(HALTED);
    assert!(log.contains("built 0\n"), "{log}");
    assert_well(&log);
    let mut check = Command::new("e2fsck");
    host::run("the disk of objects", "hosted-fsck", check.arg("-fn").arg(&objects))?;
    let there = native.vmlinux.parent().expect("its directory");
    let listed =
        Command::new("sh").args(["-c", OBJECTS]).current_dir(there).output().expect("the objects here");
    let (listed, here) =
        (String::from_utf8_lossy(&listed.stdout).into_owned(), on_disk(&objects, "/objects"));
    assert!(listed.lines().count() > 200, "{listed}");
    assert_eq!(String::from_utf8_lossy(&here), listed);
    let vmlinux = on_disk(&objects, &format!("/{directory}/vmlinux"));
    assert!(
        vmlinux == fs::read(&native.vmlinux).expect("the kernel built here"),
        "the kernel is another one"
    );
    let log = String::from_utf8_lossy(&on_disk(&objects, "/log")).into_owned();
    let compiled = log.lines().filter(|line| line.starts_with("  CC  ")).count();
    assert!(compiled > 25 && log.contains("  LD      vmlinux\n"), "{log}");
    println!(
        "{isolation}: {compiled} compiled of {} objects and a kernel of {} bytes, {}, after {needed:?}",
        listed.lines().count(),
        vmlinux.len(),
        Ingredients::default().with(&vmlinux).name()
    );
    Ok(())
}

/// Reads a file of an ext4 disk.
pub(super) fn on_disk(disk: &Path, name: &str) -> Vec<u8> {
    Command::new("debugfs").args(["-R", &format!("cat {name}")]).arg(disk).output().expect("debugfs").stdout
}

#[test]
#[ignore = "long"]
fn a_kernel_is_built_as_it_is_natively() -> Result<()> {
    build(ISOLATIONS[0])
}

#[test]
#[ignore = "long"]
fn a_kernel_is_built_the_same_in_processes_of_its_own() -> Result<()> {
    build(ISOLATIONS[1])
}
