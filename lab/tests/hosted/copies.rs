//! Copies of a machine become machines of their own by their agent and its hooks, before they are reached.

use std::collections::BTreeSet;

use super::{
    disco::{disco, done, in_folder, refused, said, tell, wait_for},
    *,
};

/// Time goes on while a machine is saved, and its kernel takes that for a stall.
const QUIET: &str = "rcupdate.rcu_cpu_stall_suppress=1 nosoftlockup";
/// The machine's own settings, as an administrator makes them.
const SET_UP: &str = "mount -t tmpfs t /tmp; cp -a /etc /tmp/etc; mount --bind /tmp/etc /etc; \
     mount -t ext4 -o ro /dev/vdb /mnt; PATH=$PATH:/mnt; mkdir -p /etc/mercury /etc/ssh; \
     cp -a /mnt/clone.d /mnt/clone-up.d /etc/mercury; \
     echo 'eth0 10.77.0.%d/24' >/etc/mercury/addresses; \
     echo 0123456789abcdef0123456789abcdef >/etc/machine-id; hostname original; \
     echo original >/etc/hostname; \
     ssh-keygen -q -N '' -t ed25519 -f /etc/ssh/ssh_host_ed25519_key; \
     ip link set eth0 up; ip address add 10.77.0.200/24 dev eth0; \
     who() { echo \"$1 is $(hostname) $(cat /etc/machine-id) \
     $(cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub) \
     $(cat /sys/class/net/eth0/address) $(ip -o -4 address show eth0 | grep -o 'inet [^ ]*')\"; }";

/// Makes a disk with the agent, its hooks as they are shipped, more of them, and the host's `ssh-keygen`.
fn disk(place: &Place, more: &[(&str, &str)]) -> Result<PathBuf> {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/guest");
    let content = place.directory.join("content");
    let mut copy = Command::new("cp");
    host::run("the agent", "agent", copy.arg("-a").arg(shipped).arg(&content))?;
    let keygen = host::find_program("ssh-keygen").expect("ssh-keygen of the host (openssh-client)");
    fs::copy(keygen, content.join("ssh-keygen")).expect("a program");
    for (name, text) in more {
        fs::write(content.join(name), text).expect("a hook");
        fs::set_permissions(content.join(name), fs::Permissions::from_mode(0o755)).expect("its rights");
    }
    let disk = place.directory.join("agent.img");
    File::create(&disk).and_then(|file| file.set_len(8 << 20)).expect("a disk");
    let mut make = Command::new("mke2fs");
    make.args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"]).arg(&content).arg(&disk);
    host::run("the agent's disk", "mke2fs", &mut make)?;
    give_to_nobody(&disk);
    Ok(disk)
}

/// Starts a machine, has it do something, and saves it.
fn save(place: &Place, options: &[&str], then: &str) {
    let mut command = place.run();
    command.env("XDG_RUNTIME_DIR", place.directory.join("run")).args(options).args(["--control", "control"]);
    command.args(["--append", &format!("{QUIET} root=/dev/vda ro init=/bin/sh")]);
    command.current_dir(&place.directory);
    let mut machine = Machine::start(place, &mut command);
    machine.wait_for("Run /bin/sh as init");
    machine.type_line(&format!("PS1=; PS2=; {SHELL}"));
    machine.wait_for("ready\n");
    machine.type_line(&format!("{SET_UP}; who first; {then}"));
    machine.wait_for("set up\n");
    let _ = fs::remove_file(place.directory.join("saved"));
    let mut save = as_nobody(&place.command);
    save.args(["hosted", "save", "control", "saved"]).current_dir(&place.directory);
    done(save);
    machine.end(HALTED);
}

/// Returns what a machine says about itself: its host name, its ID, its key, its card's address and its IP
/// address.
fn who(place: &Place, machine: &str, mark: &str) -> Vec<String> {
    tell(place, machine, &format!("who {mark}\n"));
    let end = Instant::now() + patient(LIMIT);
    loop {
        let said = said(place, machine);
        let rest = said.split_once(&format!("{mark} is ")).map(|(_, rest)| rest);
        if let Some((line, _)) = rest.and_then(|rest| rest.split_once('\n')) {
            return line.split(' ').filter(|word| *word != "inet").map(str::to_owned).collect();
        }
        assert!(Instant::now() < end, "{said}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Copies differ in their names, IDs, keys and addresses, before they read a key. They reach each other on a
/// subnet. So do copies of copies.
#[test]
#[ignore = "long"]
fn copies_are_machines_of_their_own_before_they_are_reached() -> Result<()> {
    let place = Place::new("copies")?;
    in_folder(&place);
    let root = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    // A hook that takes time: what comes from outside waits for it.
    let slow = "#!/bin/sh\nsleep 2\n\
         echo slow hook of $MERCURY_NAME $MERCURY_NUMBER $MERCURY_TEMPLATE >/dev/console\n";
    let up = "#!/bin/sh\necho up: $MERCURY_NAME >/dev/console\n";
    let agent = disk(&place, &[("clone.d/90-slow", slow), ("clone-up.d/90-up", up)])?;
    let disks = [&root, &agent].map(|disk| format!("{},ro", disk.display()));
    let options: &[&str] =
        &["--disk", &disks[0], "--disk", &disks[1], "--memory", "256", "--net", "subnet=copies"];
    let saved = [&["template", "web", "saved", "--kernel", "vmlinux"], options].concat();

    // Without an agent two machines would have one address on the subnet.
    save(&place, options, "echo set u''p");
    done(disco(&place, &saved));
    refused(&disco(&place, &["run", "web"]).output().expect("the command"), "has no agent");
    done(disco(&place, &["rm", "web"]));

    save(&place, options, "mercury-agent & sleep 1; echo set u''p");
    done(disco(&place, &saved));
    let start = Instant::now();
    done(disco(&place, &["run", "web", "--count", "2"]));
    let mut all = vec![who(&place, "web-1", "here"), who(&place, "web-2", "here")];
    assert!(start.elapsed() > Duration::from_secs(2), "keys have waited for the hook");
    done(disco(&place, &["fork", "web-1", "--name", "copy"]));
    all.push(who(&place, "copy", "forked"));
    assert_eq!(who(&place, "web-1", "still"), all[0], "a fork changes nothing in its source");
    let first = "original 0123456789abcdef0123456789abcdef";
    for (machine, words) in ["web-1", "web-2", "copy"].iter().zip(&all) {
        println!("{machine}: {words:?}");
        assert!(words.len() == 5 && words[0] == *machine && !words.join(" ").contains(first), "{words:?}");
    }
    for word in 0..5 {
        let different: BTreeSet<&String> = all.iter().map(|words| &words[word]).collect();
        assert_eq!(different.len(), 3, "{different:?}");
    }
    let addresses: Vec<&str> =
        all.iter().map(|words| words[4].split_once('/').expect("an address").0).collect();
    assert_eq!(addresses, ["10.77.0.1", "10.77.0.2", "10.77.0.3"]);
    for (number, machine) in ["web-1", "web-2", "copy"].iter().enumerate() {
        let said = wait_for(&place, machine, &format!("up: {machine}\n"));
        assert!(said.contains(&format!("slow hook of {machine} {} web\n", number + 1)), "{said}");
        assert!(!said.contains("has failed"), "{said}");
        let other = addresses[(number + 1) % 3];
        tell(&place, machine, &format!("ping -n -c 3 -i 0.2 -W 20 {other}; echo pinged $?\n"));
        let said = wait_for(&place, machine, "pinged 0\n");
        assert!(said.contains("3 packets transmitted, 3 received"), "{said}");
        assert_well(&said);
    }
    refused(&disco(&place, &["sleep", "web-2"]).output().expect("the command"), "is on a subnet");
    done(disco(&place, &["rm", "web"]));
    Ok(())
}
