//! The commands of docs/hosted.md for a machine of one's own, typed as they are in the page. The build of the
//! kernel takes half an hour, so the lab's kernel stands in for it. It has the same configuration.

use mercury_lab::pages;

use super::*;

const ESCAPE: &str = "\u{1}x";

/// Returns the page's commands, one block after the other.
fn lines() -> Result<Vec<String>> {
    Ok(pages::commands("hosted.md", "# How to")?.concat())
}

/// Returns a folder with the page's files: vmlinux with its records, and root.img and root.cpio as the page
/// makes them.
fn folder() -> Result<(Place, PathBuf)> {
    let built = previrtualization::build(Release::Bookworm, Flavour::PreVirtualized)?;
    let place = Place::with("page", &built)?;
    let lines = lines()?;
    for words in
        [&["mmdebstrap", "tree"][..], &["root.img", "mke2fs"], &["tree/init"], &["root.cpio", "find"]]
    {
        as_root(&place.directory, with(&lines, words));
    }
    give_to_nobody(&place.directory.join("root.img"));
    fs::set_permissions(&place.directory, fs::Permissions::from_mode(0o777)).expect("its rights");
    Ok((place, built.afterburner))
}

/// Types a command in a folder. Root may have no sudo, and leaves the word out.
fn as_root(folder: &Path, line: &str) {
    println!("$ {line}");
    let is_root = host::as_root("true").get_program() == "true";
    let line = if is_root { line.replace("sudo ", "") } else { line.to_owned() };
    let status = Command::new("sh").args(["-ec", &line]).current_dir(folder).status();
    assert!(status.expect("a shell").success(), "{line}");
}

/// Types a command at a terminal in the folder, as the user nobody.
fn types(place: &Place, line: &str) -> Machine {
    println!("$ {line}");
    let line = format!("PATH=$PWD:$PATH; cd {}; {line}", place.directory.display());
    let mut command = as_nobody(Path::new("script"));
    Machine::start(place, command.args(["-qec", &line, "/dev/null"]).current_dir(&place.directory))
}

/// Leaves a machine by Ctrl-A x, after its console has shown `text`.
fn shows(mut machine: Machine, text: &str) {
    machine.wait_for(text);
    machine.type_line(ESCAPE);
    assert_well(&machine.end(HALTED));
}

/// Returns the one command that has all these words.
fn with<'a>(lines: &'a [String], words: &[&str]) -> &'a str {
    let has = |line: &&String| words.iter().all(|word| line.contains(word));
    lines.iter().find(has).unwrap_or_else(|| panic!("{words:?} is not in the page: {lines:#?}"))
}

/// Programs of the page, and Debian's packages that have them. An empty name stands for programs that each
/// system has, and for Mercury's own.
const PROGRAMS: [(&str, &str); 17] = [
    ("apt", ""),
    ("sudo", ""),
    ("cd", ""),
    ("tar", ""),
    ("ln", ""),
    ("find", ""),
    ("truncate", ""),
    // Debian's priority of e2fsprogs is "required".
    ("mke2fs", ""),
    ("mercury", ""),
    ("afterburner", ""),
    ("make", "build-essential"),
    ("mmdebstrap", "mmdebstrap"),
    ("cpio", "cpio"),
    // Not typed, and needed by `--net passt`, `hosted gdb`, and the source's archive.
    ("passt", "passt"),
    ("gdb", "gdb"),
    ("xz", "build-essential"),
    ("/usr/src/linux-source-6.1.tar.xz", "linux-source-6.1"),
];

/// Returns the programs that a command starts.
fn programs(line: &str) -> Vec<String> {
    // A file's name after `>` is no program.
    let line = line.replace("$(nproc)", "2").replace("> root.cpio", "").replace("&&", "|");
    let first = |part: &str| {
        let part = part.trim();
        Some(part.strip_prefix("sudo ").unwrap_or(part).split(' ').next()?.to_owned())
    };
    line.split(['|', '(', ')']).filter_map(first).filter(|word| !word.is_empty()).collect()
}

/// A reader of the page has a fresh Debian: each program of the page comes with it, or is installed there.
#[test]
fn the_page_installs_what_it_uses() -> Result<()> {
    let lines = lines()?;
    let installed: Vec<_> = lines
        .iter()
        .filter_map(|line| line.strip_prefix("sudo apt install "))
        .flat_map(|line| line.split(' '))
        .collect();
    for (program, package) in PROGRAMS {
        assert!(package.is_empty() || installed.contains(&package), "{program}: {installed:?}");
    }
    let own = lines.iter().skip_while(|line| !line.starts_with("sudo apt"));
    for line in own {
        for program in programs(line) {
            assert!(PROGRAMS.iter().any(|(name, _)| *name == program), "{program}, in {line}");
        }
    }
    let root = mercury_lab::paths::root();
    let packaging = fs::read_to_string(root.join("packaging/build-deb")).expect("a script");
    assert!(packaging.contains("lab/guest/kernel/small.config\" \"$share/mercury/hosted.config"));
    assert!(lines.iter().any(|line| line.contains("KCONFIG_ALLCONFIG=/usr/share/mercury/hosted.config")));
    Ok(())
}

#[test]
#[ignore = "long"]
fn the_page_s_machines_start_as_they_are_typed() -> Result<()> {
    let (place, afterburner) = folder()?;
    let lines = lines()?;
    let verify = with(&lines, &["afterburner verify vmlinux"]).replacen("afterburner", "$AFTERBURNER", 1);
    let verified = Command::new("sh")
        .args(["-ec", &verify])
        .env("AFTERBURNER", &afterburner)
        .current_dir(&place.directory)
        .status();
    assert!(verified.expect("the afterburner").success(), "{verify}");
    let check = types(&place, with(&lines, &["hosted run", "--check"])).end(HALTED);
    println!("{check}");
    shows(types(&place, with(&lines, &["--initramfs root.cpio"])), "Run /init as init process");
    shows(types(&place, with(&lines, &["--disk root.img", "init=/bin/bash"])), "Run /bin/bash as init");
    shows(types(&place, with(&lines, &["root.img,private"])), "as init process");
    if host::find_program("passt").is_some() {
        shows(types(&place, with(&lines, &["--net passt", "--forward"])), "as init process");
    }
    let mut debugged = types(&place, with(&lines, &["--gdb machine.gdb"]));
    debugged.wait_for("as init process");
    let kernel = "x/s (char*)&linux_banner";
    let gdb = format!("{} -- -batch -ex '{kernel}' -ex detach", with(&lines, &["hosted gdb"]));
    let said = types(&place, &gdb).end(Some(0));
    assert!(said.contains("Linux version 6.1") && said.contains("detached"), "{said}");
    shows(debugged, "Linux version");
    Ok(())
}
