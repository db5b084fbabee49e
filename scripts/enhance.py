from rl.commands.enhance import main

raise SystemExit(main())
