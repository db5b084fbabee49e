from rl.tools.commands.prepare_data import main

raise SystemExit(main())
