//! Machines that begin as copies of a template.

use std::{collections::BTreeSet, process::Output};

use super::*;

/// Time goes on while a machine is saved, and its kernel takes that for a stall.
const QUIET: &str = "rcupdate.rcu_cpu_stall_suppress=1 nosoftlockup";
/// The programs of the machine.
const TOOLS: [&str; 9] = ["cat", "dd", "gzip", "head", "md5sum", "mknod", "od", "seq", "sort"];
/// The libraries that they need besides the C library.
const LIBRARIES: [&str; 2] = ["libpcre2-8.so.0", "libselinux.so.1"];

/// The first program: makes files, waits for a word, and then overwrites and compares them again and again.
/// Pages of the files are the template's at first.
const INIT: &str = "#!/bin/sh\n\
    mknod /urandom c 1 9\n\
    i=0; while [ $i -lt 20 ]; do seq $i $((i + 3000)) >/f$i; i=$((i + 1)); done\n\
    echo ready; read word; echo got $word\n\
    echo random $(head -c 16 /urandom | od -An -tx1)\n\
    r=0; while [ $r -lt 3 ]; do\n\
    i=0; while [ $i -lt 20 ]; do\n\
    sort -r /f$i | gzip >/g; gzip -d </g | sort -n | md5sum >/h\n\
    seq $i $((i + 3000)) | dd of=/f$i conv=notrunc 2>/dev/null\n\
    [ \"$(md5sum </f$i)\" = \"$(cat /h)\" ] || echo differs $r $i\n\
    i=$((i + 1)); done\n\
    echo round $r $(cat /f* | md5sum)\n\
    r=$((r + 1)); done\n\
    echo finished; read word; echo again $word\n\
    while :; do read word; echo says $word $(head -c 16 /urandom | od -An -tx1) $(cat /f* | md5sum); done\n";

/// A user's folder for what runs.
pub(super) fn disco(place: &Place, words: &[&str]) -> Command {
    let mut command = as_nobody(&place.command);
    command.env("XDG_RUNTIME_DIR", place.directory.join("run")).arg("disco").args(words);
    command.current_dir(&place.directory);
    command
}

pub(super) fn done(mut command: Command) -> String {
    let output = command.output().expect("the command");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(super) fn refused(output: &Output, word: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(word), "{word}: {said}");
}

/// Makes a folder for what runs.
pub fn in_folder(place: &Place) {
    fs::set_permissions(&place.directory, fs::Permissions::from_mode(0o777)).expect("its rights");
    let run = place.directory.join("run");
    fs::create_dir(&run).expect("a folder");
    give_to_nobody(&run);
    fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).expect("its rights");
}

/// Makes the files of a machine whose first program is [`INIT`].
pub(super) fn place() -> Result<(Place, PathBuf)> {
    place_with("disco", Flavour::Tiny, INIT)
}

/// Makes the files of a machine with this kernel and first program.
pub(super) fn place_with(name: &str, flavour: Flavour, init: &str) -> Result<(Place, PathBuf)> {
    let place = Place::with(name, &previrtualization::build(Release::Bookworm, flavour)?)?;
    in_folder(&place);
    let tree = Image::ensure(Release::Bookworm)?.tree();
    let archive = place.file("initramfs", &archive_of(&tree, init, &TOOLS, &LIBRARIES));
    Ok((place, archive))
}

/// Returns an initial RAM disk with this first program, and Debian's tools with the libraries that they need.
pub(super) fn archive_of(tree: &Path, init: &str, tools: &[&str], libraries: &[&str]) -> Vec<u8> {
    const FOLDER: &str = "lib/x86_64-linux-gnu";
    let tools = tools.iter().map(|tool| (format!("bin/{tool}"), tree.join("usr/bin").join(tool)));
    let libraries =
        libraries.iter().map(|name| (format!("{FOLDER}/{name}"), tree.join("usr").join(FOLDER).join(name)));
    let files: Vec<(String, PathBuf)> = tools.chain(libraries).collect();
    let programs: Vec<(&str, &Path)> =
        files.iter().map(|(name, path)| (name.as_str(), path.as_path())).collect();
    archive_with(tree, init, &programs)
}

/// Starts the machine and saves it when its first program waits.
pub(super) fn save(place: &Place, archive: &Path, more: &[&str]) {
    save_with(place, archive, "128", more);
}

/// Does the same with so many MiB of memory.
pub(super) fn save_with(place: &Place, archive: &Path, memory: &str, more: &[&str]) {
    let mut command = place.run();
    command.arg("--initramfs").arg(archive).args(["--memory", memory, "--control", "control"]).args(more);
    // Files in memory may take all of it.
    command.args(["--append", &format!("{QUIET} rootfstype=ramfs")]).current_dir(&place.directory);
    let mut machine = Machine::start(place, &mut command);
    machine.wait_for("ready\n");
    let mut save = as_nobody(&place.command);
    save.args(["hosted", "save", "control", "saved"]).current_dir(&place.directory);
    done(save);
    machine.end(HALTED);
}

pub(super) fn console(place: &Place, machine: &str) -> PathBuf {
    place.directory.join("run/mercury/disco/machines").join(machine)
}

pub(super) fn said(place: &Place, machine: &str) -> String {
    fs::read_to_string(console(place, machine).join("console.log")).unwrap_or_default().replace('\r', "")
}

pub(super) fn tell(place: &Place, machine: &str, word: &str) {
    let mut pipe =
        File::options().write(true).open(console(place, machine).join("console.in")).expect("a pipe");
    pipe.write_all(word.as_bytes()).expect("a word");
}

pub(super) fn wait_for(place: &Place, machine: &str, word: &str) -> String {
    let end = Instant::now() + patient(Duration::from_secs(120));
    loop {
        let said = said(place, machine);
        if said.contains(word) {
            return said;
        }
        assert!(Instant::now() < end, "{machine} did not say {word:?}: {said}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Waits for the answer to a word. Returns it: random bytes, and the sum of all files.
pub(super) fn answer(place: &Place, machine: &str, word: &str) -> String {
    let begin = format!("says {word} ");
    let whole = |said: &str| {
        let rest = said.split_once(&begin)?.1;
        rest.split_once('\n').map(|(line, _)| line.to_owned())
    };
    let end = Instant::now() + patient(Duration::from_secs(120));
    loop {
        let said = said(place, machine);
        if let Some(line) = whole(&said) {
            return line;
        }
        assert!(Instant::now() < end, "{machine} has no answer to {word:?}: {said}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the sums of the rounds.
pub(super) fn sums(said: &str) -> BTreeSet<String> {
    said.lines().filter_map(|line| Some(line.strip_prefix("round ")?.split_once(' ')?.1.to_owned())).collect()
}

pub(super) fn json(place: &Place, words: &[&str]) -> serde_json::Value {
    let mut command = as_nobody(&place.command);
    command.env("XDG_RUNTIME_DIR", place.directory.join("run")).args(["--json", "disco"]).args(words);
    serde_json::from_str(&done(command)).expect("JSON")
}

pub(super) fn pid(place: &Place, machine: &str) -> i32 {
    let listed = json(place, &["list"]);
    let machines = listed["machines"].as_array().expect("machines").clone();
    let found = machines.into_iter().find(|one| one["name"] == machine).expect("the machine");
    found["pid"].as_i64().expect("a number") as i32
}

/// Machines that begin as copies of one compute what it would have, in memory that they share until they
/// write. The end of the template, or of one of them, is nothing to the others.
#[test]
fn clones_compute_what_their_template_would_have() -> Result<()> {
    let (place, archive) = place()?;
    save(&place, &archive, &[]);
    done(disco(&place, &["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"]));
    let template = ["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"];
    refused(&disco(&place, &template).output().expect("the command"), "a template web already");
    done(disco(&place, &["run", "web", "--count", "8"]));
    let machines: Vec<String> = (1..=8).map(|number| format!("web-{number}")).collect();
    let fresh = json(&place, &["map"]);
    let base = fresh["templates"][0]["base_bytes"].as_u64().expect("a size");
    for machine in fresh["machines"].as_array().expect("machines") {
        let own = machine["own_bytes"].as_u64().expect("a size");
        assert!(own * 4 < base, "{machine}: a machine that has done nothing shares most");
    }
    for machine in &machines[..4] {
        tell(&place, machine, "go\n");
    }
    let first = wait_for(&place, &machines[0], "finished\n");
    for machine in &machines[..4] {
        let said = wait_for(&place, machine, "finished\n");
        assert!(said.contains("got go") && !said.contains("differs"), "{said}");
        assert!(sums(&said) == sums(&first) && sums(&said).len() == 1, "{said}");
        assert_well(&said);
    }
    let random: BTreeSet<String> = machines[..4]
        .iter()
        .filter_map(|machine| {
            Some(said(&place, machine).lines().find(|line| line.starts_with("random "))?.into())
        })
        .collect();
    assert_eq!(random.len(), 4, "clones must not make the same keys: {random:?}");

    // A machine that is killed harms no other, and neither does the end of the template.
    kill_process(Pid::from_raw(pid(&place, &machines[1])).expect("a number"), Signal::KILL).expect("its end");
    wait_for(&place, &machines[1], "was ended by signal 9");
    let listed = json(&place, &["list"]);
    let template = listed["templates"][0]["pid"].as_i64().expect("a number") as i32;
    kill_process(Pid::from_raw(template).expect("a number"), Signal::KILL).expect("its end");
    tell(&place, &machines[0], "now\n");
    wait_for(&place, &machines[0], "again now\n");
    // The others begin their work only now, without the template.
    for machine in &machines[4..] {
        tell(&place, machine, "go\n");
    }
    for machine in &machines[4..] {
        let said = wait_for(&place, machine, "finished\n");
        assert!(!said.contains("differs") && sums(&said) == sums(&first), "{said}");
    }
    for machine in machines.iter().filter(|machine| **machine != machines[1]) {
        done(disco(&place, &["stop", machine]));
    }
    refused(&disco(&place, &["stop", &machines[0]]).output().expect("the command"), "no machine web-1 runs");
    refused(&disco(&place, &["run", "web"]).output().expect("the command"), "no template web");
    assert!(json(&place, &["list"])["machines"].as_array().expect("machines").is_empty());

    // The name is free again. A machine on this terminal ends with its template's client.
    done(disco(&place, &["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"]));
    let mut attached = Machine::start(&place, &mut disco(&place, &["run", "web"]));
    let input = attached.child.stdin.as_mut().expect("its input");
    input.write_all(b"go\n").expect("a word");
    attached.wait_for("finished\n");
    assert_eq!(sums(&attached.said()), sums(&first));
    done(disco(&place, &["rm", "web"]));
    attached.end(HALTED);
    Ok(())
}

/// A machine is forked while it computes. It and its copies compute the same, and each goes on when the
/// others have ended. So does a copy of a copy, however deep.
#[test]
fn a_running_machine_is_forked() -> Result<()> {
    /// So many that files are put together.
    const DEEP: usize = 20;
    let (place, archive) = place()?;
    save(&place, &archive, &[]);
    done(disco(&place, &["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"]));
    done(disco(&place, &["run", "web", "--detach"]));
    tell(&place, "web-1", "go\n");
    wait_for(&place, "web-1", "round 0");
    let forked = json(&place, &["fork", "web-1", "--count", "3"]);
    println!("the machine stood still for {} us", forked["pause_us"]);
    assert_eq!(forked["machines"], serde_json::json!(["web-1-1", "web-1-2", "web-1-3"]));
    done(disco(&place, &["fork", "web-1", "--name", "other"]));
    let original = wait_for(&place, "web-1", "finished\n");
    let copies = ["web-1-1", "web-1-2", "web-1-3", "other"];
    for copy in copies {
        let said = wait_for(&place, copy, "finished\n");
        assert!(!said.contains("differs") && !said.contains("got go"), "it began in the middle: {said}");
        assert!(sums(&said) == sums(&original) && sums(&said).len() == 1, "{said}");
        assert_well(&said);
    }
    let all = [&["web-1"][..], &copies].concat();
    let mut answers = BTreeSet::new();
    for machine in &all {
        tell(&place, machine, "now\n");
        wait_for(&place, machine, "again now\n");
        tell(&place, machine, "here\n");
        answers.insert(answer(&place, machine, "here"));
    }
    assert_eq!(answers.len(), all.len(), "copies must not make the same keys: {answers:?}");

    // A copy in a file goes on like the others. The machine goes on meanwhile.
    done(disco(&place, &["save", "other", "copy"]));
    refused(
        &disco(&place, &["save", "other", "copy"]).output().expect("the command"),
        "copy is there already",
    );
    done(disco(&place, &["template", "later", "copy", "--kernel", "vmlinux", "--memory", "128"]));
    done(disco(&place, &["run", "later", "--detach"]));
    for machine in ["other", "later-1"] {
        tell(&place, machine, "more\n");
        assert!(answers.insert(answer(&place, machine, "more")), "{machine} makes keys of another");
    }
    done(disco(&place, &["rm", "later"]));

    // Each copy is forked, and then ended.
    let mut newest = "web-1-1".to_owned();
    for number in 1..=DEEP {
        let next = format!("deep-{number}");
        done(disco(&place, &["fork", &newest, "--name", &next]));
        done(disco(&place, &["stop", &newest]));
        newest = next;
    }
    let sums: BTreeSet<&str> = answers.iter().filter_map(|one| one.split_whitespace().nth(16)).collect();
    assert_eq!(sums.len(), 1, "the files of all are the same: {answers:?}");
    let answer_of_all = answers.first().expect("an answer");
    let sum = answer_of_all.split_whitespace().rev().nth(1).expect("a sum").to_owned();
    tell(&place, &newest, "deep\n");
    let said = answer(&place, &newest, "deep");
    assert!(said.contains(&sum), "its files are not what they were: {said}");

    // Twice it was forked before.
    for _ in 0..5 {
        done(disco(&place, &["fork", "web-1"]));
    }
    refused(&disco(&place, &["fork", "web-1"]).output().expect("the command"), "as often as it can be");
    tell(&place, "web-1", "still\n");
    assert!(answer(&place, "web-1", "still").contains(&sum));
    refused(&disco(&place, &["fork", "nobody"]).output().expect("the command"), "no machine nobody runs");

    let map = json(&place, &["map"]);
    let [guests, mapped] = ["guest_bytes", "pss_guest_bytes"].map(|name| map[name].as_u64().expect("a size"));
    assert!(mapped <= guests, "no page is counted twice: {map}");
    done(disco(&place, &["rm", "web"]));
    assert!(json(&place, &["list"])["machines"].as_array().expect("machines").is_empty());
    Ok(())
}

/// What cannot be a template is refused, with the reason.
#[test]
fn what_cannot_be_cloned_is_refused() -> Result<()> {
    let (place, archive) = place()?;
    let disk = place.file("disk", &[0; 4096]);
    save(&place, &archive, &["--disk", disk.to_str().expect("a path")]);
    let template = |more: &[&str]| {
        let words = ["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"];
        disco(&place, &[&words[..], more].concat()).output().expect("the command")
    };
    let disk = disk.to_str().expect("a path").to_owned();
    refused(&template(&["--disk", &disk]), "clones would all write to");
    refused(&template(&["--isolation", "process"]), "--isolation=process cannot be cloned");
    refused(&template(&["--control", "socket"]), "a clone has one processor");
    let whole = fs::read(place.directory.join("saved")).expect("the file");
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    place.file("saved", &damaged);
    refused(&template(&[]), "is damaged");
    place.file("saved", &whole);
    // The machine has a disk, and its clone would not. The template cannot see that, but the clone is
    // refused.
    done(disco(&place, &["template", "web", "saved", "--kernel", "vmlinux", "--memory", "128"]));
    let output = disco(&place, &["run", "web"]).output().expect("the command");
    assert!(!output.status.success(), "{output:?}");
    let nowhere = disco(&place, &["run", "web", "--forward", "8080:80"]).output().expect("the command");
    refused(&nowhere, "no network card");
    refused(
        &disco(&place, &["template", "../x", "saved", "--kernel", "vmlinux"]).output().expect("it"),
        "a name has",
    );
    done(disco(&place, &["rm", "web"]));
    Ok(())
}
