from rl.commands.prepare_data import main

raise SystemExit(main())
